#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "golden/store/golden_case.hpp"
#include "golden/store/sha256.hpp"
#include "model/base/same_bytes.hpp"

namespace lockstep::golden {
namespace {

namespace fs = std::filesystem;

fs::path golden_dir() { return fs::path(LOCKSTEP_SOURCE_DIR) / "golden" / "data"; }

/// A folder of its own per test, removed afterwards.
class Folder {
 public:
  Folder() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    path_ = fs::temp_directory_path() /
            fmt::format("lockstep-{}-{}-{}", info->test_suite_name(), info->name(), getpid());
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path_); }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// The error a call ends with; fails the test when there is none.
template <typename Call>
std::pair<ErrorKind, std::string> error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  ADD_FAILURE() << "expected an error";
  return {ErrorKind::kInternal, ""};
}

TEST(Sha256, GivesThePublishedDigestsWhateverThePieces) {
  EXPECT_EQ(Sha256().hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 abc;
  abc.update("abc", 3);
  EXPECT_EQ(abc.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string million(1000000, 'a');
  for (size_t piece : {1ul, 55ul, 56ul, 63ul, 64ul, 65ul, 1000000ul}) {
    Sha256 digest;
    for (size_t i = 0; i < million.size(); i += piece) {
      digest.update(million.data() + i, std::min(piece, million.size() - i));
    }
    EXPECT_EQ(digest.hex(), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST(Hdf5, EveryDtypeAndShapeComesBackToTheBit) {
  const Folder folder;
  const auto file = folder.path() / "all.h5";
  std::map<std::string, Tensor> written;
  int64_t n = 0;
  for (auto dtype : {at::kDouble,
                     at::kFloat,
                     at::kHalf,
                     at::kBFloat16,
                     at::kLong,
                     at::kInt,
                     at::kShort,
                     at::kChar,
                     at::kByte}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, {7}, {3, 5}, {0, 4}, {2, 1, 3, 2}, {300, 1000}}) {
      Tensor t = (at::arange(c10::multiply_integers(shape), at::kDouble) * 0.37 - 1.5)
                     .reshape(shape)
                     .to(dtype);
      written["group/deeper/" + dtype_name(dtype) + std::to_string(n++)] = t;
    }
  }
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const Tensor odd =
      at::tensor({-0.0, inf, -inf, nan, 5e-324, 1.7976931348623157e308}, at::kDouble);
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    written["odd/" + dtype_name(dtype)] = odd.to(dtype);
  }
  written["strided"] = at::arange(12, at::kFloat).reshape({3, 4}).t();
  Hdf5Writer writer(file);
  bool deflate = false;
  for (const auto& [name, t] : written) writer.write(name, t, deflate = !deflate);
  writer.commit();

  const Hdf5Reader reader(file);
  EXPECT_EQ(reader.datasets().size(), written.size());
  for (const auto& [name, t] : written) {
    const Tensor got = reader.read(name);
    ASSERT_EQ(describe(got), describe(t)) << name;
    EXPECT_EQ(reader.shape(name), t.sizes().vec());
    EXPECT_TRUE(same_bytes(got, t)) << name;
  }
}

TEST(Hdf5, ListsGroupsStringsAndAttributes) {
  const Folder folder;
  const auto file = folder.path() / "list.h5";
  {
    Hdf5Writer writer(file);
    writer.write("b/one", at::zeros({2}));
    writer.write("a", at::zeros({1}));
    writer.write("b/c/two", at::ones({1}, at::kInt));
    writer.write_strings("b/names", {"layers.0.self_attn", "", "x "});
    writer.write_strings("none", {});
    writer.attribute("", "case", "tiny");
    writer.attribute("", "empty", "");
    writer.attribute("b/one", "seed", int64_t{-7});
    writer.attribute("b", "gap", 0.125);
    writer.commit();
  }
  const Hdf5Reader reader(file);
  EXPECT_EQ(reader.list(), (std::vector<std::string>{"a", "b", "none"}));
  EXPECT_EQ(reader.list("b"), (std::vector<std::string>{"c", "names", "one"}));
  EXPECT_EQ(reader.datasets("b"), (std::vector<std::string>{"b/c/two", "b/names", "b/one"}));
  EXPECT_EQ(reader.read_strings("b/names"),
            (std::vector<std::string>{"layers.0.self_attn", "", "x "}));
  EXPECT_TRUE(reader.read_strings("none").empty());
  EXPECT_EQ(reader.attribute_string("", "case"), "tiny");
  EXPECT_EQ(reader.attribute_string("", "empty"), "");
  EXPECT_EQ(reader.attribute_int("b/one", "seed"), -7);
  EXPECT_EQ(reader.attribute_double("b", "gap"), 0.125);
  EXPECT_EQ(reader.attributes(), (std::vector<std::string>{"case", "empty"}));
  EXPECT_TRUE(reader.exists("b/c/two"));
  EXPECT_FALSE(reader.exists("b/d/two"));
  EXPECT_FALSE(reader.has_attribute("b", "seed"));
}

TEST(Hdf5, ErrorsNameFileAndDataset) {
  const Folder folder;
  const auto file = folder.path() / "small.h5";
  {
    Hdf5Writer writer(file);
    writer.write("a/b", at::zeros({2}));
    writer.commit();
  }
  const Hdf5Reader reader(file);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { (void)reader.read("a/missing"); },
           [&] { (void)reader.read("a"); },
           [&] { (void)reader.list("a/b"); },
           [&] { (void)reader.read_strings("a/b"); },
           [&] { (void)reader.attribute_int("a/b", "seed"); },
       }) {
    const auto [kind, text] = error_of(call);
    EXPECT_EQ(kind, ErrorKind::kInput);
    EXPECT_NE(text.find(file.string()), std::string::npos) << text;
    EXPECT_NE(text.find("'a"), std::string::npos) << text;
  }
  EXPECT_EQ(error_of([&] { Hdf5Reader(folder.path() / "none.h5", ErrorKind::kGolden); }).first,
            ErrorKind::kGolden);
  std::ofstream(folder.path() / "text.h5") << "no HDF5";
  EXPECT_EQ(error_of([&] { Hdf5Reader(folder.path() / "text.h5"); }).first, ErrorKind::kInput);
}

TEST(Hdf5, NothingIsLeftWithoutCommit) {
  const Folder folder;
  {
    Hdf5Writer writer(folder.path() / "x.h5");
    writer.write("a", at::zeros({2}));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  Hdf5Writer writer(folder.path() / "x.h5");
  writer.write("a", at::zeros({2}));
  EXPECT_FALSE(fs::exists(folder.path() / "x.h5"));
  EXPECT_THROW(writer.write("a", at::zeros({2})), Error);
  writer.commit();
  EXPECT_TRUE(fs::exists(folder.path() / "x.h5"));
  EXPECT_THROW(writer.commit(), Error);
}

TEST(Hdf5, AFileThatOutgrowsItsLimitIsToldInWordsOfTheSystem) {
  const Folder folder;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 64 * 1024;
  setrlimit(RLIMIT_FSIZE, &small);
  const auto [kind, text] = error_of([&] {
    Hdf5Writer file(folder.path() / "x.h5");
    file.write("values", at::ones({100000}, at::kDouble));
    file.commit();
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(exit_code(kind), 2);
  EXPECT_NE(text.find("File too large"), std::string::npos) << text;
  for (const char* raw : {"errno", "time =", "file descriptor"}) {
    EXPECT_EQ(text.find(raw), std::string::npos) << text;
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(GoldenStore, AManifestThatNamesACaseTwiceIsDamaged) {
  const Folder folder;
  std::ofstream(folder.path() / "MANIFEST.json")
      << R"({"format_version": 1, "cases": {"a": {}, "a": {}}})";
  const auto [kind, text] = error_of([&] { read_manifest(folder.path()); });
  EXPECT_EQ(exit_code(kind), 4);
  EXPECT_NE(text.find("'a' is there twice"), std::string::npos) << text;
}

TEST(GoldenStore, EveryCommittedFileMatchesItsManifestAndItsWeightsRemake) {
  int64_t total = 0;
  const auto entries = read_manifest(golden_dir());
  EXPECT_GE(entries.size(), 12u);
  for (const auto& entry : entries) {
    SCOPED_TRACE(entry.name);
    total += entry.size_bytes;
    EXPECT_EQ(entry.generator_commit.find("dirty"), std::string::npos);
    if (entry.name == "indexer_fp8") {
      verify_entry(golden_dir(), entry);
      continue;
    }
    const GoldenCase golden = open_golden(golden_dir(), entry.name);
    EXPECT_EQ(golden.name(), entry.name);
    EXPECT_EQ(golden.seed(), static_cast<uint64_t>(entry.seed));
    EXPECT_EQ(golden.checkpoint().empty(), entry.checkpoint_files.empty());
    if (golden.checkpoint().empty()) {
      EXPECT_EQ(golden.weights().size(), golden.weight_rules().size());
    } else {
      EXPECT_EQ(exit_code(error_of([&] { (void)golden.weights(); }).first), 4);
    }
    EXPECT_EQ(golden.cu_seqlens().back(), golden.ids().size(0));
    for (const char* kind : {"pools", "experts", "groups"}) {
      EXPECT_GE(golden.min_gap(kind), 1e-5) << kind;
      EXPECT_GE(golden.min_gap(kind),
                10 * golden.file().attribute_double("", fmt::format("f32_score_error_{}", kind)));
    }
  }
  EXPECT_LT(total, int64_t{16} << 20);
}

TEST(GoldenStore, ACheckpointThatBelongsToACaseIsCheckedWithIt) {
  const GoldenCase golden = open_golden(golden_dir(), "hf-tiny");
  EXPECT_EQ(golden.checkpoint(), golden_dir() / "hf-tiny" / "released");
  std::ifstream config(golden.checkpoint() / "config.json");
  const std::string text((std::istreambuf_iterator<char>(config)),
                         std::istreambuf_iterator<char>());
  EXPECT_EQ(golden.config_json(), text);
  EXPECT_EQ(find_entry(golden_dir(), "hf-tiny").checkpoint_files.size(), 4u);

  const Folder folder;
  fs::copy(golden_dir() / "hf-tiny", folder.path() / "hf-tiny", fs::copy_options::recursive);
  fs::copy_file(golden_dir() / "MANIFEST.json", folder.path() / "MANIFEST.json");
  EXPECT_NO_THROW(open_golden(folder.path(), "hf-tiny"));
  const auto weights = folder.path() / "hf-tiny" / "modules" / "model.safetensors";
  {
    std::fstream bytes(weights, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(-1, std::ios::end);
    bytes.put('\x7f');
  }
  const auto [kind, message] = error_of([&] { open_golden(folder.path(), "hf-tiny"); });
  EXPECT_EQ(exit_code(kind), 4);
  EXPECT_NE(message.find(weights.string()), std::string::npos) << message;
  EXPECT_NE(message.find("sha256"), std::string::npos) << message;
}

TEST(GoldenStore, TinyHoldsWhatItsDocumentsAndConfigSay) {
  const GoldenCase golden = open_golden(golden_dir(), "tiny");
  EXPECT_EQ(golden.cu_seqlens(), (std::vector<int64_t>{0, 75, 76, 83, 213}));
  EXPECT_EQ(describe(golden.logits()), "[213, 131] float64");
  EXPECT_NE(golden.config_json().find("\"index_kpool\": 4"), std::string::npos);

  // The stored loss and logprobs follow from the stored logits.
  const Tensor logprobs = golden.logprobs(), all = at::log_softmax(golden.logits(), -1);
  const Tensor ids = golden.ids();
  const auto cu = golden.cu_seqlens();
  double sum = 0.0;
  int64_t targets = 0;
  for (size_t d = 0; d + 1 < cu.size(); ++d) {
    for (int64_t t = cu[d]; t < cu[d + 1]; ++t) {
      const double stored = logprobs[t].item<double>();
      if (t + 1 == cu[d + 1]) {
        EXPECT_TRUE(std::isnan(stored)) << t;
        continue;
      }
      EXPECT_NEAR(stored, all[t][ids[t + 1].item<int64_t>()].item<double>(), 1e-12);
      sum -= stored;
      ++targets;
    }
  }
  EXPECT_NEAR(golden.loss(), sum / static_cast<double>(targets), 1e-12);

  // Selections: ascending row indices inside the document, then -1; all keys while they fit.
  const Tensor rows = golden.activation("layers.3.self_attn.indexer").values;
  EXPECT_EQ(describe(rows), "[213, 27] int32");
  for (size_t d = 0; d + 1 < cu.size(); ++d) {
    for (int64_t t = cu[d]; t < cu[d + 1]; ++t) {
      const int64_t visible = t - cu[d] + 1;
      const int64_t want = std::min<int64_t>(6, visible / 4) * 4 + visible % 4;
      int64_t got = 0, before = -1;
      for (int64_t j = 0; j < rows.size(1); ++j) {
        const int64_t key = rows[t][j].item<int>();
        if (key < 0) continue;
        ASSERT_EQ(got, j) << "a gap before the end of the selection of token " << t;
        ASSERT_GT(key, before);
        ASSERT_GE(key, cu[d]);
        ASSERT_LE(key, t);
        before = key;
        ++got;
      }
      ASSERT_EQ(got, want) << "token " << t;
    }
  }

  // Frozen tensors have no gradient; large ones are sketched, small ones whole; spreads are there.
  const auto grads = golden.grad_names();
  for (const auto& name : grads) EXPECT_EQ(name.find("indexer"), std::string::npos);
  EXPECT_EQ(golden.grad("model.layers.0.self_attn.A_log").kind, StoredKind::kWhole);
  const auto embed = golden.grad("model.embed_tokens.weight");
  EXPECT_EQ(embed.kind, StoredKind::kTensor);
  EXPECT_EQ(embed.shape, (std::vector<int64_t>{131, 96}));
  const auto block = golden.activation("layers.3");
  EXPECT_EQ(block.kind, StoredKind::kTokens);
  EXPECT_EQ(block.shape, (std::vector<int64_t>{213, 4 * 96}));
  const auto spread = golden.spread("grads/model.embed_tokens.weight");
  ASSERT_TRUE(spread.has_value());
  EXPECT_EQ(spread->f32.size(), 5u);
  EXPECT_EQ(spread->bf16.size(), 5u);
  EXPECT_LT(spread->f32[0], 1e-4);
  EXPECT_THROW((void)golden.spread("grads/none"), Error);
}

TEST(GoldenStore, MissingStaleAndDamagedFilesExitWithCode4AndSayWhatToRun) {
  const Folder folder;
  const auto expect = [&](const char* what, const std::string& word) {
    SCOPED_TRACE(what);
    const auto [kind, text] = error_of([&] { open_golden(folder.path(), "one_kda"); });
    EXPECT_EQ(exit_code(kind), 4);
    EXPECT_NE(text.find(word), std::string::npos) << text;
    EXPECT_NE(text.find("make_goldens.py"), std::string::npos) << text;
    EXPECT_NE(text.find(folder.path().string()), std::string::npos) << text;
  };
  expect("no manifest", "missing");
  std::ofstream(folder.path() / "MANIFEST.json") << "{";
  expect("broken manifest", "damaged");
  fs::copy_file(golden_dir() / "MANIFEST.json",
                folder.path() / "MANIFEST.json",
                fs::copy_options::overwrite_existing);
  expect("no file", "is missing");

  const auto file = folder.path() / "one_kda" / "v1.h5";
  fs::create_directories(file.parent_path());
  fs::copy_file(golden_dir() / "one_kda" / "v1.h5", file);
  EXPECT_NO_THROW(open_golden(folder.path(), "one_kda"));
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(100000);
    const char flipped = static_cast<char>(bytes.get() ^ 1);
    bytes.seekp(100000);
    bytes.put(flipped);
  }
  expect("one bit flipped", "sha256");
  fs::resize_file(file, fs::file_size(file) - 1);
  expect("cut short", "bytes");

  std::ifstream in(golden_dir() / "MANIFEST.json");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string version = "\"format_version\": 1";
  text.replace(text.find(version), version.size(), "\"format_version\": 99");
  std::ofstream(folder.path() / "MANIFEST.json") << text;
  expect("format of tomorrow", "stale");

  const auto [kind, message] = error_of([] { open_golden(golden_dir(), "nosuch"); });
  EXPECT_EQ(kind, ErrorKind::kGolden);
  EXPECT_NE(message.find("tiny"), std::string::npos) << message;
}

/// The smallest file that counts as a case, with one weight.
void write_small_case(const fs::path& file, int64_t version, const std::string& sha256) {
  Hdf5Writer writer(file);
  writer.attribute("", "case", "small");
  writer.attribute("", "format_version", version);
  writer.attribute("", "seed", int64_t{3});
  writer.attribute("", "weights_sha256", sha256);
  writer.write_strings("weights/names", {"a.weight"});
  writer.write_strings("weights/dtypes", {"F32"});
  writer.write("weights/shapes", at::tensor({5, 2, -1}, at::kLong).reshape({1, 3}));
  writer.write("weights/rules", at::tensor({1.0, 0.2}, at::kDouble).reshape({1, 2}));
  writer.commit();
}

TEST(GoldenStore, WeightsAreRefusedWhenTheirBytesAreNotTheReferences) {
  const Folder folder;
  const auto file = folder.path() / "v1.h5";
  const Tensor w = make_weight({"a.weight", {5, 2}, at::kFloat, 1.0, 0.2}, 3);
  EXPECT_LE((w - 1.0).abs().max().item<float>(), 0.2001F);
  Sha256 digest;
  digest.update(w.data_ptr(), w.nbytes());
  write_small_case(file, kGoldenFormatVersion, digest.hex());
  EXPECT_TRUE(at::equal(GoldenCase(file).weights().at("a.weight"), w));
  EXPECT_FALSE(GoldenCase(file).spread("logits").has_value());

  write_small_case(file, kGoldenFormatVersion, std::string(64, '0'));
  const auto [kind, text] = error_of([&] { (void)GoldenCase(file).weights(); });
  EXPECT_EQ(exit_code(kind), 4);
  EXPECT_NE(text.find("seed 3"), std::string::npos) << text;

  write_small_case(file, kGoldenFormatVersion + 1, digest.hex());
  EXPECT_NE(error_of([&] { GoldenCase stale(file); }).second.find("stale"), std::string::npos);
}

TEST(GoldenStore, WeightsRoundToTheirFileDtype) {
  const GoldenCase golden = open_golden(golden_dir(), "one_kda");
  const auto weights = golden.weights();
  EXPECT_EQ(weights.at("lm_head.weight").scalar_type(), at::kBFloat16);
  for (const char* name : {"A_log", "dt_bias", "q_conv1d.weight"}) {
    EXPECT_EQ(weights.at(fmt::format("model.layers.0.self_attn.{}", name)).scalar_type(),
              at::kFloat);
  }
  const auto& rule = golden.weight_rules().front();
  EXPECT_TRUE(at::equal(make_weight(rule, golden.seed()), weights.at(rule.name)));
  EXPECT_FALSE(at::equal(make_weight(rule, golden.seed() + 1), weights.at(rule.name)));
}

}  // namespace
}  // namespace lockstep::golden
