#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>

#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {
namespace {

using ::testing::HasSubstr;

std::string npy(const std::string& descr,
                const std::string& shape,
                bool fortran,
                const std::string& data) {
  std::string header = "{'descr': '" + descr +
                       "', 'fortran_order': " + (fortran ? "True" : "False") +
                       ", 'shape': " + shape + ", }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string bytes = "\x93NUMPY";
  bytes += '\1';
  bytes += '\0';
  bytes += static_cast<char>(header.size() & 0xFF);
  bytes += static_cast<char>(header.size() >> 8);
  return bytes + header + data;
}

template <typename T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void put(std::string& text, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i, value >>= 8) text += static_cast<char>(value & 0xFF);
}

/// A zip file of one entry, stored or deflated.
std::string zip_of(const std::string& name, const std::string& data, bool deflated) {
  std::string packed = data;
  if (deflated) {
    packed.assign(compressBound(data.size()) + 64, '\0');
    z_stream stream{};
    deflateInit2(&stream, 9, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
    stream.avail_in = static_cast<uInt>(data.size());
    stream.next_out = reinterpret_cast<Bytef*>(packed.data());
    stream.avail_out = static_cast<uInt>(packed.size());
    deflate(&stream, Z_FINISH);
    packed.resize(stream.total_out);
    deflateEnd(&stream);
  }
  const auto crc =
      crc32(0L, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size()));
  std::string shared;
  put(shared, 20, 2);
  put(shared, 0, 2);
  put(shared, deflated ? 8 : 0, 2);
  put(shared, 0, 4);
  put(shared, crc, 4);
  put(shared, packed.size(), 4);
  put(shared, data.size(), 4);
  put(shared, name.size(), 2);
  put(shared, 0, 2);
  std::string zip = "PK\x03\x04" + shared + name + packed;
  const size_t directory = zip.size();
  zip += "PK\x01\x02";
  put(zip, 20, 2);
  zip += shared;
  put(zip, 0, 2 + 2 + 2 + 4);
  zip.append(2, '\0');
  put(zip, 0, 4);
  zip.resize(directory + 42);
  put(zip, 0, 4);
  zip += name;
  const size_t directory_size = zip.size() - directory;
  zip += "PK\x05\x06";
  put(zip, 0, 4);
  put(zip, 1, 2);
  put(zip, 1, 2);
  put(zip, directory_size, 4);
  put(zip, directory, 4);
  put(zip, 0, 2);
  return zip;
}

class Npz : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& bytes) {
    const auto path = std::filesystem::path(testing::TempDir()) / "lockstep_npz_test.npz";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
};

TEST_F(Npz, StoredAndDeflatedArraysReadBack) {
  const std::vector<float> values = {1.5F, -2.0F, 3.25F, 0.0F, 7.0F, -0.5F};
  for (const bool deflated : {false, true}) {
    const auto file = open_tensor_file(
        write(zip_of("a/b.npy", npy("<f4", "(2, 3)", false, raw(values)), deflated)));
    ASSERT_EQ(file->names(), std::vector<std::string>{"a/b"});
    const Tensor tensor = file->load("a/b");
    EXPECT_EQ(tensor.sizes().vec(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(tensor[1][2].item<float>(), -0.5F);
    EXPECT_EQ(tensor[0][1].item<float>(), -2.0F);
  }
}

TEST_F(Npz, FortranOrderScalarsEmptyAndNarrowTypes) {
  const Tensor turned =
      parse_npy(npy("<i8", "(2, 3)", true, raw<int64_t>({0, 1, 2, 3, 4, 5})), "x");
  EXPECT_EQ(turned[1][0].item<int64_t>(), 1);
  EXPECT_EQ(turned[0][2].item<int64_t>(), 4);
  EXPECT_EQ(parse_npy(npy("<f8", "()", false, raw<double>({2.5})), "x").item<double>(), 2.5);
  EXPECT_EQ(parse_npy(npy("<f8", "(0, 4)", false, ""), "x").sizes().vec(),
            (std::vector<int64_t>{0, 4}));
  const Tensor bf16 = parse_npy(npy("|V2", "(1,)", false, raw<uint16_t>({0x3FC0})), "x");
  EXPECT_EQ(bf16.scalar_type(), at::kBFloat16);
  EXPECT_EQ(bf16.to(at::kFloat).item<float>(), 1.5F);
}

TEST_F(Npz, DamageIsAnInputErrorThatSaysWhat) {
  const std::string good = zip_of("x.npy", npy("<f4", "(1,)", false, raw<float>({1.0F})), true);
  const auto expect = [&](const std::string& bytes, const std::string& part) {
    try {
      const auto file = open_npz(write(bytes));
      for (const std::string& name : file->names()) file->load(name);
      ADD_FAILURE() << "accepted a file that should say: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  expect(good.substr(0, good.size() - 30), "directory");
  std::string flipped = good;
  flipped[40] = static_cast<char>(flipped[40] ^ 0x55);
  expect(flipped, "x.npy");
  expect(zip_of("x.npy", npy("<f4", "(2,)", false, raw<float>({1.0F})), false),
         "4 bytes of data where its shape needs 8");
  expect(zip_of("x.npy", npy("|O", "(1,)", false, "12345678"), false), "dtype");
  expect(zip_of("x.npy", npy(">f4", "(1,)", false, "1234"), false), "little-endian");
  expect(zip_of("x.npy", "hello", false), "no npy header");
}

}  // namespace
}  // namespace lockstep::harness
