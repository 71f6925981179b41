// JSON as text: checks and slices that keep every byte of what was read, without a JSON library in
// the interface.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::model {

/// Throws kInput naming `origin` unless `text` is one JSON document (UTF-8) in which no object
/// repeats a key and nothing nests more than 64 deep. The message carries line and column, or the
/// path of the repeated key.
void check_json(std::string_view text, std::string_view origin);

/// One member of an object: its decoded key and the bytes of its value as written.
struct RawMember {
  std::string key;
  std::string value;
};

/// Members of a JSON object in file order. `object` must have passed check_json; throws kInput
/// naming `origin` if it is not an object.
std::vector<RawMember> raw_members(std::string_view object, std::string_view origin);

/// An object from members, one per line, `indent` spaces before each key.
std::string join_members(const std::vector<RawMember>& members, int indent);

/// Whole content of a file. Throws kInput naming the path if it cannot be read.
std::string read_text_file(const std::string& path);

}  // namespace lockstep::model
