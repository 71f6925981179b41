// Members of a JSON object edited in place, keeping the bytes of what does not change. Internal to
// this room; needs the JSON library.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "model/config/json_text.hpp"

namespace lockstep::model {

using Members = std::vector<RawMember>;

/// Null if there is no such key; valid until a member is added.
RawMember* find_member(Members& members, std::string_view key);
void erase_member(Members& members, std::string_view key);
/// Keeps the bytes of a member that already says `value`; adds the member if there is none.
void set_member(Members& members, std::string_view key, const nlohmann::json& value);
/// Adds the member with these bytes unless the key exists.
void add_member(Members& members, std::string_view key, std::string_view value);

}  // namespace lockstep::model
