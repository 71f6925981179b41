#include "model/config/config_members.hpp"

#include <algorithm>

namespace lockstep::model {

RawMember* find_member(Members& members, std::string_view key) {
  const auto it =
      std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.key == key; });
  return it == members.end() ? nullptr : &*it;
}

void erase_member(Members& members, std::string_view key) {
  std::erase_if(members, [&](const RawMember& m) { return m.key == key; });
}

void set_member(Members& members, std::string_view key, const nlohmann::json& value) {
  RawMember* member = find_member(members, key);
  if (member == nullptr) {
    members.push_back({std::string(key), value.dump()});
  } else if (nlohmann::json::parse(member->value) != value) {
    member->value = value.dump();
  }
}

void add_member(Members& members, std::string_view key, std::string_view value) {
  if (find_member(members, key) == nullptr) {
    members.push_back({std::string(key), std::string(value)});
  }
}

}  // namespace lockstep::model
