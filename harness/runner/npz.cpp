// Just enough of zip and npy to read what numpy writes.
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>

#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {
namespace {

struct Entry {
  uint64_t offset = 0, packed = 0, size = 0;
  uint16_t method = 0, flags = 0;
  uint32_t crc = 0;
};

template <typename T>
T little(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

class Zip {
 public:
  explicit Zip(std::filesystem::path path) : path_(std::move(path)), in_(path_, std::ios::binary) {
    if (!in_.good()) damaged("it cannot be opened");
    in_.seekg(0, std::ios::end);
    size_ = static_cast<uint64_t>(in_.tellg());
    read_directory();
  }

  [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }

  [[nodiscard]] std::string extract(const std::string& name) const {
    const Entry& entry = entries_.at(name);
    if ((entry.flags & 1) != 0) damaged(name + " is encrypted");
    const std::string head = bytes(entry.offset, 30);
    if (little<uint32_t>(head.data()) != 0x04034b50) damaged("no local header of " + name);
    const uint64_t start =
        entry.offset + 30 + little<uint16_t>(head.data() + 26) + little<uint16_t>(head.data() + 28);
    std::string data = bytes(start, entry.packed);
    if (entry.method == 8) {
      data = inflate_raw(data, entry.size, name);
    } else if (entry.method != 0) {
      damaged(fmt::format(
          "{} uses compression {}, which is neither stored nor deflate", name, entry.method));
    }
    uLong crc = crc32(0L, Z_NULL, 0);
    for (size_t at = 0; at < data.size(); at += 1U << 30) {
      crc = crc32(crc,
                  reinterpret_cast<const Bytef*>(data.data() + at),
                  static_cast<uInt>(std::min<size_t>(1U << 30, data.size() - at)));
    }
    if (crc != entry.crc) damaged("the checksum of " + name + " does not match");
    return data;
  }

 private:
  [[noreturn]] void damaged(const std::string& why) const {
    fail(ErrorKind::kInput,
         "npz {}: {}; the file is damaged or not one that numpy.savez wrote, save it again",
         path_.string(),
         why);
  }

  [[nodiscard]] std::string bytes(uint64_t offset, uint64_t count) const {
    if (offset > size_ || count > size_ - offset) damaged("it is truncated");
    std::string data(count, '\0');
    in_.clear();
    in_.seekg(static_cast<std::streamoff>(offset));
    in_.read(data.data(), static_cast<std::streamsize>(count));
    if (static_cast<uint64_t>(in_.gcount()) != count) damaged("it is truncated");
    return data;
  }

  [[nodiscard]] std::string inflate_raw(const std::string& packed,
                                        uint64_t size,
                                        const std::string& name) const {
    // Deflate shrinks at most about 1032 times; a larger claim would only allocate for nothing.
    if (size / 1100 > packed.size() + 1) damaged("the size of " + name + " is impossible");
    std::string data(size, '\0');
    z_stream stream{};
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) damaged("zlib did not start");
    uint64_t in_at = 0, out_at = 0;
    int code = Z_OK;
    while (code == Z_OK) {
      const auto in_now = static_cast<uInt>(std::min<uint64_t>(packed.size() - in_at, 1U << 30));
      const auto out_now = static_cast<uInt>(std::min<uint64_t>(size - out_at, 1U << 30));
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data() + in_at));
      stream.avail_in = in_now;
      stream.next_out = reinterpret_cast<Bytef*>(data.data() + out_at);
      stream.avail_out = out_now;
      code = inflate(&stream, Z_NO_FLUSH);
      in_at += in_now - stream.avail_in;
      out_at += out_now - stream.avail_out;
    }
    inflateEnd(&stream);
    if (code != Z_STREAM_END || out_at != size) damaged(name + " does not decompress");
    return data;
  }

  void read_directory() {
    // The end record is in the last 22 bytes plus a comment of up to 65535.
    const uint64_t tail_size = std::min<uint64_t>(size_, 22 + 65535);
    const std::string tail = bytes(size_ - tail_size, tail_size);
    std::optional<size_t> end;
    for (size_t at = tail.size() < 22 ? 0 : tail.size() - 21; at-- > 0;) {
      if (little<uint32_t>(tail.data() + at) == 0x06054b50) {
        end = at;
        break;
      }
    }
    if (!end) damaged("it has no zip directory");
    const char* record = tail.data() + *end;
    uint64_t count = little<uint16_t>(record + 10), offset = little<uint32_t>(record + 16);
    if ((count == 0xFFFF || offset == 0xFFFFFFFF) && *end >= 20 &&
        little<uint32_t>(record - 20) == 0x07064b50) {
      const std::string wide = bytes(little<uint64_t>(record - 20 + 8), 56);
      count = little<uint64_t>(wide.data() + 32);
      offset = little<uint64_t>(wide.data() + 48);
    }
    for (uint64_t i = 0; i < count; ++i) {
      const std::string head = bytes(offset, 46);
      if (little<uint32_t>(head.data()) != 0x02014b50) damaged("its directory is broken");
      Entry entry;
      entry.flags = little<uint16_t>(head.data() + 8);
      entry.method = little<uint16_t>(head.data() + 10);
      entry.crc = little<uint32_t>(head.data() + 16);
      entry.packed = little<uint32_t>(head.data() + 20);
      entry.size = little<uint32_t>(head.data() + 24);
      const uint16_t name_size = little<uint16_t>(head.data() + 28);
      const uint16_t extra_size = little<uint16_t>(head.data() + 30);
      entry.offset = little<uint32_t>(head.data() + 42);
      const std::string rest = bytes(offset + 46, uint64_t{name_size} + extra_size);
      read_wide_sizes(std::string_view(rest).substr(name_size), entry);
      entries_[rest.substr(0, name_size)] = entry;
      offset += uint64_t{46} + name_size + extra_size + little<uint16_t>(head.data() + 32);
    }
  }

  /// The zip64 field holds, in this order, those of size, packed size and offset that did not fit.
  static void read_wide_sizes(std::string_view extra, Entry& entry) {
    while (extra.size() >= 4) {
      const uint16_t id = little<uint16_t>(extra.data());
      const size_t size = little<uint16_t>(extra.data() + 2);
      if (extra.size() < 4 + size) return;
      std::string_view field = extra.substr(4, size);
      if (id == 1) {
        for (uint64_t* value : {&entry.size, &entry.packed, &entry.offset}) {
          if (*value != 0xFFFFFFFF || field.size() < 8) continue;
          *value = little<uint64_t>(field.data());
          field.remove_prefix(8);
        }
      }
      extra.remove_prefix(4 + size);
    }
  }

  std::filesystem::path path_;
  mutable std::ifstream in_;
  uint64_t size_ = 0;
  std::map<std::string, Entry> entries_;
};

class NpzFile final : public TensorFile {
 public:
  explicit NpzFile(const std::filesystem::path& path) : path_(path), zip_(path) {}
  std::vector<std::string> names() const override {
    std::vector<std::string> result;
    for (const auto& [entry, _] : zip_.entries()) {
      if (entry.ends_with(".npy")) result.push_back(entry.substr(0, entry.size() - 4));
    }
    return result;
  }
  Tensor load(const std::string& name) const override {
    return parse_npy(zip_.extract(name + ".npy"), fmt::format("{} in {}", name, path_.string()));
  }

 private:
  std::filesystem::path path_;
  Zip zip_;
};

/// Text between `from` and `to` after `key` in the header dictionary.
std::string header_field(const std::string& header, const std::string& key, char to) {
  const size_t at = header.find("'" + key + "'");
  if (at == std::string::npos) return {};
  const size_t colon = header.find(':', at);
  const size_t start = header.find_first_not_of(' ', colon + 1);
  const size_t end = header.find(to, start + 1);
  if (colon == std::string::npos || start == std::string::npos || end == std::string::npos)
    return {};
  return header.substr(start, end - start);
}

std::optional<at::ScalarType> npy_dtype(const std::string& descr) {
  static const std::map<std::string, at::ScalarType> table = {{"<f8", at::kDouble},
                                                              {"<f4", at::kFloat},
                                                              {"<f2", at::kHalf},
                                                              {"|V2", at::kBFloat16},
                                                              {"<V2", at::kBFloat16},
                                                              {"<i8", at::kLong},
                                                              {"<i4", at::kInt},
                                                              {"<i2", at::kShort},
                                                              {"|i1", at::kChar},
                                                              {"|u1", at::kByte},
                                                              {"|b1", at::kBool}};
  const auto row = table.find(descr);
  if (row == table.end()) return std::nullopt;
  return row->second;
}

}  // namespace

Tensor parse_npy(const std::string& bytes, const std::string& what) {
  const auto check = [&](bool ok, const std::string& why) {
    LOCKSTEP_CHECK(ok, kInput, "npy {}: {}; save the array again with numpy.save", what, why);
  };
  check(bytes.size() >= 10 && bytes.compare(0, 6, "\x93NUMPY") == 0, "no npy header");
  const int major = static_cast<unsigned char>(bytes[6]);
  check(major >= 1 && major <= 3, fmt::format("format version {}", major));
  const size_t prefix = major == 1 ? 10 : 12;
  check(bytes.size() >= prefix, "truncated");
  const size_t header_size =
      major == 1 ? little<uint16_t>(bytes.data() + 8) : little<uint32_t>(bytes.data() + 8);
  check(bytes.size() - prefix >= header_size, "truncated header");
  const std::string header = bytes.substr(prefix, header_size);
  std::string descr = header_field(header, "descr", ',');
  descr.erase(std::remove(descr.begin(), descr.end(), '\''), descr.end());
  const auto dtype = npy_dtype(descr);
  check(dtype.has_value(),
        fmt::format("dtype '{}' is not one of float64, float32, float16, bfloat16, int64, int32, "
                    "int16, int8, uint8, bool in little-endian order; leave arrays of strings and "
                    "objects out",
                    descr));
  const bool fortran = header_field(header, "fortran_order", ',').starts_with("True");
  const std::string shape_text = header_field(header, "shape", ')');
  check(shape_text.starts_with("("), "no shape in the header");
  std::vector<int64_t> shape;
  int64_t count = 1;
  for (size_t at = 1; at < shape_text.size();) {
    const size_t digit = shape_text.find_first_of("0123456789", at);
    if (digit == std::string::npos) break;
    size_t used = 0;
    shape.push_back(std::stoll(shape_text.substr(digit), &used));
    check(shape.back() == 0 || count <= (int64_t{1} << 48) / shape.back(), "impossible shape");
    count *= shape.back();
    at = digit + used;
  }
  const size_t data_at = prefix + header_size;
  const auto expected = static_cast<size_t>(count) * at::elementSize(*dtype);
  check(bytes.size() - data_at == expected,
        fmt::format("{} bytes of data where its shape needs {}", bytes.size() - data_at, expected));
  std::vector<int64_t> stored = shape;
  if (fortran) std::reverse(stored.begin(), stored.end());
  Tensor tensor = at::empty(stored, at::TensorOptions(*dtype));
  if (expected > 0) std::memcpy(tensor.mutable_data_ptr(), bytes.data() + data_at, expected);
  if (!fortran) return tensor;
  std::vector<int64_t> order(shape.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(order.size() - 1 - i);
  return tensor.permute(order).contiguous();
}

std::unique_ptr<TensorFile> open_npz(const std::filesystem::path& path) {
  return std::make_unique<NpzFile>(path);
}

}  // namespace lockstep::harness
