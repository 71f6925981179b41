// safetensors files: what is read, what is refused, and that writing is all or nothing.
#include "model/checkpoint/safetensors.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/base/same_bytes.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lockstep-safetensors-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { fs::remove_all(dir_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (dir_ / name).string(); }

  /// A file with any header text and data, right or wrong.
  std::string put(const std::string& name,
                  const std::string& header,
                  const std::string& data) const {
    std::ofstream file(path(name), std::ios::binary);
    const uint64_t size = header.size();
    file.write(reinterpret_cast<const char*>(&size), 8);
    file << header << data;
    return path(name);
  }
  [[nodiscard]] std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path dir_;
};

template <typename F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

TEST_F(SafetensorsTest, EveryDtypeAndShapeComesBackByteForByte) {
  std::map<std::string, Tensor> tensors;
  for (at::ScalarType dtype : {at::kDouble,
                               at::kFloat,
                               at::kHalf,
                               at::kBFloat16,
                               at::kFloat8_e4m3fn,
                               at::kFloat8_e5m2,
                               at::kLong,
                               at::kInt,
                               at::kShort,
                               at::kChar,
                               at::kByte,
                               at::kUInt16,
                               at::kUInt32,
                               at::kUInt64,
                               at::kBool}) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
    Tensor raw = at::arange(15 * bytes, at::kByte);
    if (dtype == at::kBool) raw = raw.remainder(2);
    tensors[std::string(safetensors_dtype(dtype))] = raw.view(dtype).view({3, 5});
  }
  tensors["empty"] = at::empty({0, 4}, at::kFloat);
  tensors["scalar"] = at::full({}, 2.5, at::kDouble);
  tensors["odd \"name\" \u00e9"] = at::ones({1, 1, 1}, at::kHalf);
  write_safetensors_file(path("all.safetensors"), tensors, {{"k", "v \"quoted\""}});

  const Safetensors read = Safetensors::open(path("all.safetensors"));
  EXPECT_EQ(read.tensors().size(), tensors.size());
  EXPECT_EQ(read.metadata().at("k"), "v \"quoted\"");
  for (const auto& [name, want] : tensors) {
    const Tensor got = read.load(name);
    EXPECT_EQ(got.scalar_type(), want.scalar_type()) << name;
    EXPECT_EQ(got.sizes(), want.sizes()) << name;
    if (want.numel() == 0) continue;
    EXPECT_TRUE(same_bytes(got, want)) << name;
    EXPECT_EQ(got.const_data_ptr(), read.load(name).const_data_ptr()) << name << " was copied";
  }
}

TEST_F(SafetensorsTest, ViewsOutliveTheReader) {
  write_safetensors_file(path("a.safetensors"), {{"x", at::arange(10, at::kFloat)}});
  Tensor view;
  {
    const Safetensors read = Safetensors::open(path("a.safetensors"));
    view = read.load("x");
    read.release("x");
  }
  EXPECT_TRUE(at::equal(view, at::arange(10, at::kFloat)));
}

TEST_F(SafetensorsTest, DataAtAnUnalignedAddressIsReadRight) {
  const Tensor want = at::arange(6, at::kDouble);
  const std::string bytes(static_cast<const char*>(want.const_data_ptr()), want.nbytes());
  std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("x":{"dtype":"F64","shape":[2,3],"data_offsets":[1,49]}})";
  for (int padding = 0; padding < 8; ++padding, header += " ") {
    const Safetensors read = Safetensors::open(put("u.safetensors", header, "z" + bytes));
    const Tensor got = read.load("x");
    EXPECT_TRUE(at::equal(got, want.view({2, 3})));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(got.const_data_ptr()) % 8, 0U);
  }
}

TEST_F(SafetensorsTest, DamagedFilesAreRefusedWithFileTensorAndCause) {
  const auto entry = [](const std::string& name,
                        const std::string& dtype,
                        const std::string& shape,
                        const std::string& offsets) {
    return fmt::format(
        R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
  };
  const std::string eight(8, 'x');
  const struct {
    const char* what;
    std::string header, data;
    std::vector<const char*> parts;
  } cases[] = {
      {"malformed JSON", "{\"a\":", "", {"not valid JSON"}},
      {"not an object", "[1]", "", {"object"}},
      {"unknown dtype", "{" + entry("a", "F4", "[2]", "[0,8]") + "}", eight, {"F4", "BF16"}},
      {"wrong size", "{" + entry("a", "F32", "[3]", "[0,8]") + "}", eight, {"tensor a", "12", "8"}},
      {"overflowing shape",
       "{" + entry("a", "F32", "[4611686018427387904,16]", "[0,8]") + "}",
       eight,
       {"tensor a", "2^64"}},
      {"negative size",
       "{" + entry("a", "F32", "[-2]", "[0,8]") + "}",
       eight,
       {"tensor a", "shape"}},
      {"fractional size", "{" + entry("a", "F32", "[2.0]", "[0,8]") + "}", eight, {"tensor a"}},
      {"backwards",
       "{" + entry("a", "F32", "[2]", "[8,0]") + "}",
       eight,
       {"tensor a", "backwards"}},
      {"negative offset", "{" + entry("a", "F32", "[2]", "[-8,0]") + "}", eight, {"offset"}},
      {"three offsets", "{" + entry("a", "F32", "[2]", "[0,4,8]") + "}", eight, {"data_offsets"}},
      {"past the end",
       "{" + entry("a", "F32", "[4]", "[0,16]") + "}",
       eight,
       {"tensor a", "cut off"}},
      {"overlap",
       "{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("b", "F16", "[2]", "[2,6]") + "}",
       "xxxxxx",
       {"tensor b", "overlap"}},
      {"same bytes twice",
       "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[0,8]") + "}",
       eight,
       {"overlap"}},
      {"gap",
       "{" + entry("a", "U8", "[2]", "[0,2]") + "," + entry("b", "F32", "[1]", "[4,8]") + "}",
       eight,
       {"tensor b", "gap"}},
      {"gap at the start",
       "{" + entry("a", "F32", "[1]", "[4,8]") + "}",
       eight,
       {"tensor a", "gap"}},
      {"surplus data", "{" + entry("a", "F32", "[1]", "[0,4]") + "}", eight, {"4 bytes follow"}},
      {"data without tensors", "{}", eight, {"8 bytes follow"}},
      {"repeated name",
       "{" + entry("a", "F32", "[1]", "[0,4]") + "," + entry("a", "F32", "[1]", "[4,8]") + "}",
       eight,
       {"\"a\"", "twice"}},
      {"missing dtype",
       R"({"a":{"shape":[2],"data_offsets":[0,8]}})",
       eight,
       {"tensor a", "dtype"}},
      {"metadata not strings", R"({"__metadata__":{"format":1}})", "", {"__metadata__", "format"}},
  };
  for (const auto& row : cases) {
    const std::string file = put("bad.safetensors", row.header, row.data);
    const std::string text = refusal([&] { Safetensors::open(file); });
    EXPECT_THAT(text, HasSubstr("bad.safetensors")) << row.what;
    for (const char* part : row.parts) EXPECT_THAT(text, HasSubstr(part)) << row.what;
  }
}

TEST_F(SafetensorsTest, FilesShorterThanTheyClaimAreRefused) {
  write_safetensors_file(path("whole.safetensors"), {{"x", at::arange(100, at::kFloat)}});
  const auto size = fs::file_size(path("whole.safetensors"));
  for (uintmax_t keep = 0; keep < size; keep += 7) {
    fs::copy_file(
        path("whole.safetensors"), path("cut.safetensors"), fs::copy_options::overwrite_existing);
    fs::resize_file(path("cut.safetensors"), keep);
    EXPECT_THAT(refusal([&] { Safetensors::open(path("cut.safetensors")); }),
                HasSubstr("cut.safetensors"));
  }
  std::ofstream(path("big.safetensors"), std::ios::binary) << std::string(8, '\xff') << "{}";
  EXPECT_THAT(refusal([&] { Safetensors::open(path("big.safetensors")); }),
              AllOf(HasSubstr("header"), HasSubstr("18446744073709551615")));
  EXPECT_THAT(refusal([&] { Safetensors::open(path("absent.safetensors")); }),
              HasSubstr("absent.safetensors"));
}

TEST_F(SafetensorsTest, UnknownNamesAreAnsweredWithTheNearest) {
  write_safetensors_file(path("a.safetensors"),
                         {{"layers.1.x", at::ones({1})}, {"layers.2.x", at::ones({1})}});
  EXPECT_THAT(refusal([&] {
                static_cast<void>(Safetensors::open(path("a.safetensors")).load("layers.1.y"));
              }),
              AllOf(HasSubstr("layers.1.y"), HasSubstr("layers.1.x")));
}

std::vector<TensorToWrite> six_tensors() {
  std::vector<TensorToWrite> tensors;
  for (int64_t i = 0; i < 6; ++i) {
    const at::ScalarType dtype = i % 2 == 0 ? at::kBFloat16 : at::kFloat;
    tensors.push_back({fmt::format("layers.{}.w", i), dtype, {2 * i + 1, 3}, [i, dtype] {
                         return at::full({2 * i + 1, 3}, static_cast<double>(i), dtype);
                       }});
  }
  return tensors;
}

TEST_F(SafetensorsTest, ShardsAndTheirIndexReadBackAndAreTheSameBytesEveryTime) {
  WriteOptions options;
  options.max_shard_bytes = 100;
  const auto files = write_safetensors(dir_.string(), six_tensors(), options);
  ASSERT_GT(files.size(), 2U);
  EXPECT_EQ(files.back(), "model.safetensors.index.json");
  EXPECT_EQ(files.front(), fmt::format("model-00001-of-{:05}.safetensors", files.size() - 1));

  const json index = json::parse(read_text_file(path("model.safetensors.index.json")));
  uint64_t total = 0;
  const Safetensors read = Safetensors::open(dir_.string());
  for (const TensorToWrite& tensor : six_tensors()) {
    total += tensor.bytes();
    EXPECT_TRUE(at::equal(read.load(tensor.name), tensor.produce())) << tensor.name;
    EXPECT_EQ(read.load(tensor.name).const_data_ptr(), read.load(tensor.name).const_data_ptr());
    EXPECT_EQ(index["weight_map"][tensor.name],
              fs::path(read.files()[read.info(tensor.name).shard]->path()).filename().string());
  }
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(read.total_bytes(), total);
  for (const auto& file : read.files()) {
    uint64_t data = 0, count = 0;
    for (const auto& [name, info] : read.tensors()) {
      if (read.files()[info.shard] != file) continue;
      data += info.bytes();
      ++count;
    }
    EXPECT_TRUE(data <= 100 || count == 1) << file->path();
  }

  fs::create_directory(dir_ / "again");
  EXPECT_EQ(write_safetensors(path("again"), six_tensors(), options), files);
  for (const std::string& file : files) {
    EXPECT_EQ(read_text_file(path(file)), read_text_file(path("again/" + file))) << file;
  }
}

TEST_F(SafetensorsTest, ATensorLargerThanAShardGetsOneOfItsOwn) {
  WriteOptions options;
  options.max_shard_bytes = 1;
  EXPECT_EQ(write_safetensors(dir_.string(), six_tensors(), options).size(), 7U);
  EXPECT_EQ(Safetensors::open(dir_.string()).tensors().size(), 6U);
}

TEST_F(SafetensorsTest, OneShardNeedsNoIndexAndFoldersMayHoldShardsAlone) {
  EXPECT_THAT(write_safetensors(dir_.string(), six_tensors()), ElementsAre("model.safetensors"));
  EXPECT_THAT(listing(), ElementsAre("model.safetensors"));
  fs::rename(path("model.safetensors"), path("weights-a.safetensors"));
  write_safetensors_file(path("weights-b.safetensors"), {{"more", at::ones({2})}});
  EXPECT_EQ(Safetensors::open(dir_.string()).tensors().size(), 7U);
}

TEST_F(SafetensorsTest, AnIndexThatDisagreesWithItsFilesIsRefused) {
  WriteOptions options;
  options.max_shard_bytes = 100;
  write_safetensors(dir_.string(), six_tensors(), options);
  const std::string index_file = path("model.safetensors.index.json");
  const json index = json::parse(read_text_file(index_file));
  const auto with = [&](const auto& change) {
    json changed = index;
    change(changed);
    std::ofstream(index_file) << changed.dump();
    return refusal([&] { Safetensors::open(dir_.string()); });
  };
  EXPECT_THAT(with([](json& c) { c["weight_map"]["layers.0.w"] = "model-9.safetensors"; }),
              AllOf(HasSubstr("index.json"), HasSubstr("model-9.safetensors")));
  EXPECT_THAT(with([](json& c) { c["weight_map"]["ghost"] = c["weight_map"]["layers.0.w"]; }),
              AllOf(HasSubstr("ghost"), HasSubstr("absent")));
  EXPECT_THAT(with([](json& c) { c["weight_map"]["layers.0.w"] = c["weight_map"]["layers.5.w"]; }),
              HasSubstr("layers.0.w"));
  EXPECT_THAT(with([](json& c) { c["weight_map"].erase("layers.0.w"); }),
              AllOf(HasSubstr("layers.0.w"), HasSubstr("not listed")));
  EXPECT_THAT(with([](json& c) { c["weight_map"]["layers.0.w"] = "../model.safetensors"; }),
              HasSubstr("layers.0.w"));
  EXPECT_THAT(with([](json& c) { c.erase("weight_map"); }), HasSubstr("weight_map"));
  std::ofstream(index_file) << R"({"weight_map": {"a": "x", "a": "y"}})";
  EXPECT_THAT(refusal([&] { Safetensors::open(dir_.string()); }), HasSubstr("twice"));
  std::ofstream(index_file) << index.dump();
  EXPECT_EQ(Safetensors::open(dir_.string()).tensors().size(), 6U);

  write_safetensors_file(path("model.safetensors"), {{"x", at::ones({1})}});
  EXPECT_THAT(refusal([&] { Safetensors::open(dir_.string()); }), HasSubstr("both"));
}

TEST_F(SafetensorsTest, ATensorInTwoShardsIsRefusedNamingBoth) {
  write_safetensors_file(path("a.safetensors"), {{"x", at::ones({1})}});
  write_safetensors_file(path("b.safetensors"), {{"x", at::ones({1})}});
  EXPECT_THAT(refusal([&] { Safetensors::open(dir_.string()); }),
              AllOf(HasSubstr("tensor x"), HasSubstr("a.safetensors"), HasSubstr("b.safetensors")));
  fs::remove(path("a.safetensors"));
  fs::remove(path("b.safetensors"));
  EXPECT_THAT(refusal([&] { Safetensors::open(dir_.string()); }), HasSubstr("no .safetensors"));
}

TEST_F(SafetensorsTest, AFailureWhileWritingLeavesNothingBehind) {
  WriteOptions options;
  options.max_shard_bytes = 100;
  auto tensors = six_tensors();
  tensors[5].produce = []() -> Tensor { fail(ErrorKind::kInput, "the source broke"); };
  EXPECT_THAT(refusal([&] { write_safetensors(dir_.string(), tensors, options); }),
              HasSubstr("the source broke"));
  EXPECT_THAT(listing(), ElementsAre());

  tensors[5].produce = [] { return at::ones({1}, at::kFloat); };
  EXPECT_THROW(write_safetensors(dir_.string(), tensors, options), Error);
  tensors[5] = tensors[0];
  EXPECT_THAT(refusal([&] { write_safetensors(dir_.string(), tensors, options); }),
              HasSubstr("twice"));
  EXPECT_THAT(listing(), ElementsAre());
}

TEST_F(SafetensorsTest, AFullDiskIsSaidSoAndLeavesNothingBehind) {
  const int full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  const std::string piece(64, 'x');
  EXPECT_THAT(refusal([&] { write_all(full, piece.data(), piece.size(), "model.safetensors"); }),
              AllOf(HasSubstr("model.safetensors"),
                    HasSubstr("No space left"),
                    HasSubstr("free some space")));
  ::close(full);

  // The same through the writer: a limit on file size stands in for the disk.
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 4096, old.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = refusal([&] {
    write_safetensors_file(path("big.safetensors"), {{"x", at::zeros({100000}, at::kFloat)}});
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(text, AllOf(HasSubstr("big.safetensors"), HasSubstr("free some space")));
  EXPECT_THAT(listing(), ElementsAre());
  EXPECT_THAT(refusal([&] { write_safetensors(path("no/such/folder"), six_tensors()); }),
              HasSubstr("no/such/folder"));
}

TEST_F(SafetensorsTest, AnOlderFileStaysWholeWhenItsReplacementFails) {
  write_safetensors_file(path("x.safetensors"), {{"x", at::ones({3})}});
  EXPECT_THROW(
      write_safetensors_file(path("x.safetensors"), {{"x", at::ones({3}, at::kComplexFloat)}}),
      Error);
  EXPECT_TRUE(at::equal(Safetensors::open(path("x.safetensors")).load("x"), at::ones({3})));
}

}  // namespace
}  // namespace lockstep::model
