// What the built program says of files that are not what they should be: tensors of other dtypes,
// files without tensors, checkpoints that do not fit or hold NaN, stores that are damaged.
#include <limits>

#include "golden/store/hdf5.hpp"
#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

using Files = Program;

constexpr const char* kGate = "model.language_model.layers.1.mlp.gate.weight";

TEST_F(Files, CompareCallsBitsEqualOnlyWhenDtypesAre) {
  const Tensor wide = at::arange(1, 7, at::kDouble).reshape({2, 3}).div(7.0);
  model::write_safetensors_file(path("f64.safetensors"), {{"x", wide}});
  model::write_safetensors_file(path("f16.safetensors"), {{"x", wide.to(at::kHalf)}});
  model::write_safetensors_file(path("exact.safetensors"),
                                {{"x", wide.to(at::kHalf).to(at::kDouble)}});
  const Outcome rounded = lockstep({"compare", path("f16.safetensors"), path("f64.safetensors")});
  EXPECT_EQ(rounded.exit_code, 1);
  EXPECT_THAT(rounded.output, HasSubstr("dtypes differ: float16 against float64, 6 of 6"));
  const Outcome exact = lockstep({"compare", path("f16.safetensors"), path("exact.safetensors")});
  EXPECT_EQ(exact.exit_code, 1);
  EXPECT_THAT(exact.output, HasSubstr("all values equal"));
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"compare", path("f16.safetensors"), path("f64.safetensors")});
    return lockstep(more).exit_code;
  };
  EXPECT_EQ(with({"--limit", "1e-3"}), 0);
  EXPECT_EQ(with({"--limit", "1e-5"}), 1);
  EXPECT_EQ(with({"--limit", "0", "--limit", "float16=1e-3"}), 0);
  EXPECT_EQ(with({"--limit", "float32=1"}), 1);  // no limit for this pair: equal bits
  EXPECT_EQ(with({"--metric", "ulp_max", "--limit", "float16=0"}), 0);
  const Outcome json =
      lockstep({"compare", path("f16.safetensors"), path("f64.safetensors"), "--json"});
  EXPECT_THAT(json.output, HasSubstr("\"equal_bits\": false"));
  EXPECT_THAT(json.output, HasSubstr("\"left_dtype\": \"float16\""));
}

TEST_F(Files, CompareRefusesLimitsAndPatternsThatMeanNothing) {
  model::write_safetensors_file(path("a.safetensors"), {{"weight", at::ones({3})}});
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"compare", path("a.safetensors"), path("a.safetensors")});
    return lockstep(more);
  };
  for (const char* limit : {"nan", "-1", "inf", "1e-3x", "float16=nan", "float16=-1"}) {
    expect_refused(with({"--limit", limit}), 2, {"--limit"});
  }
  expect_refused(with({"--limit", "half=1"}), 2, {"half", "float16"});
  expect_refused(with({"--limit", "1", "--limit", "2"}), 2, {"twice"});
  expect_refused(with({"--metric", "cosine", "--limit", "2"}), 2, {"between -1 and 1"});
  expect_refused(with({"--only", "wieght"}), 2, {"--only wieght", "did you mean 'weight'?"});
  expect_refused(with({"--only", ""}), 2, {"--only", "is empty"});
  EXPECT_EQ(with({"--only", "we*"}).exit_code, 0);
}

TEST_F(Files, CompareNamesTheFirstTensorOverItsLimitInModelOrderBesideTheWorst) {
  std::map<std::string, Tensor> want, got;
  for (int layer = 0; layer < 12; ++layer) {
    for (const char* module : {"", ".self_attn", ".mlp"}) {
      const std::string name = fmt::format("layers.{}{}", layer, module);
      want[name] = at::ones({2, 3}, at::kDouble);
      got[name] = want[name].clone();
    }
  }
  got["layers.1"][0][0] += 1e-9;
  got["layers.2.mlp"][1][2] += 1e-3;
  got["layers.10"][0][1] += 0.5;
  model::write_safetensors_file(path("want.safetensors"), want);
  model::write_safetensors_file(path("got.safetensors"), got);
  const auto compare = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"compare", path("got.safetensors"), path("want.safetensors")});
    return lockstep(more);
  };
  const Outcome text = compare({"--limit", "1e-6"});
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_THAT(text.output,
              HasSubstr("first over its limit in model order: layers.2.mlp (position 8 of 36): "
                        "rel_l2 4.08e-4, limit 1e-6; layers.2.mlp[1,2]: got 1.001 "));
  EXPECT_THAT(text.output, HasSubstr("worst: layers.10 (position 33 of 36): rel_l2 0.204"));
  EXPECT_LT(text.output.find("\nlayers.2 "), text.output.find("\nlayers.10 "));
  EXPECT_THAT(compare({}).output,
              HasSubstr("first with unequal bits in model order: layers.1 (position 6 of 36)"));
  EXPECT_THAT(compare({"--limit", "1", "--floor", path("want.safetensors")}).output,
              HasSubstr("first over its noise floor in model order: layers.1 "));
  const Outcome json = compare({"--limit", "1e-6", "--json"});
  EXPECT_THAT(json.output, HasSubstr("\"first_over_limit\": {\n    \"left\": \"layers.2.mlp\""));
  EXPECT_THAT(json.output, HasSubstr("\"worst\": {\n    \"left\": \"layers.10\""));
}

TEST_F(Files, APlantedChangeIsNamedAsTheLayerItWasMadeIn) {
  const std::string model =
      changed_model("model.language_model.layers.2.mlp.gate.weight",
                    [](const Tensor& value) { return value.mul(1.5).to(value.scalar_type()); });
  const auto dump = [&](const std::string& from, const std::string& to) {
    return lockstep({"dump",
                     "--model",
                     from,
                     "--docs",
                     path("docs.json"),
                     "--modules",
                     "*",
                     "--policy",
                     "float64",
                     "--out",
                     path(to)})
        .exit_code;
  };
  ASSERT_EQ(dump(kModel, "want.h5"), 0);
  ASSERT_EQ(dump(model, "got.h5"), 0);
  const Outcome found = lockstep({"compare", path("got.h5"), path("want.h5"), "--limit", "1e-9"});
  EXPECT_EQ(found.exit_code, 1);
  EXPECT_THAT(found.output, HasSubstr("first over its limit in model order: layers.2.mlp"));
}

TEST_F(Files, CompareSaysWhyNamesWithoutAPartnerFail) {
  const Tensor one = at::ones({3});
  model::write_safetensors_file(path("a.safetensors"), {{"x", one}, {"h.0.attn", one}});
  model::write_safetensors_file(path("b.safetensors"), {{"x", one}, {"layers.0.self_attn", one}});
  model::write_safetensors_file(path("c.safetensors"), {{"x", one}});
  const Outcome named = lockstep({"compare", path("a.safetensors"), path("b.safetensors"), "-q"});
  EXPECT_EQ(named.exit_code, 1);
  EXPECT_THAT(named.output, HasSubstr("FAIL: tensors without a partner: 1 only in "));
  EXPECT_THAT(named.output, HasSubstr("a.safetensors: h.0.attn; 1 only in "));
  EXPECT_THAT(named.output, HasSubstr("b.safetensors: layers.0.self_attn; "));
  EXPECT_THAT(named.output, HasSubstr("--module-map"));
  const Outcome more = lockstep({"compare", path("a.safetensors"), path("c.safetensors")});
  EXPECT_EQ(more.exit_code, 1);
  EXPECT_THAT(more.output, HasSubstr("1 only in"));
  EXPECT_THAT(more.output, Not(HasSubstr("--module-map")));
  EXPECT_THAT(lockstep({"compare", path("a.safetensors"), path("c.safetensors"), "--json"}).output,
              HasSubstr("\"reason\": \"FAIL: tensors without a partner: 1 only in"));
}

TEST_F(Files, OptionsThatMayBeRepeatedLeaveFilesAlone) {
  const Tensor one = at::ones({3});
  model::write_safetensors_file(path("a.safetensors"), {{"x", one}, {"y", one}, {"z", one}});
  model::write_safetensors_file(path("b.safetensors"), {{"x", one}, {"y", one}, {"z", one + 1}});
  const std::string a = path("a.safetensors"), b = path("b.safetensors");
  using Words = std::vector<std::string>;
  for (const Words& words : {Words{"compare", "--only", "x", "--only", "y", a, b},
                             Words{"compare", a, b, "--only", "x", "--only", "y"},
                             Words{"compare", "--only", "x,y", a, "--limit", "0", b}}) {
    const Outcome outcome = lockstep(words);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    EXPECT_THAT(outcome.output, HasSubstr("2 of 2 tensors pass"));
  }
  const Outcome golden = lockstep({"golden", "verify", "--policy", "float32,float64", "tinny"});
  EXPECT_EQ(golden.exit_code, 4);
  EXPECT_THAT(golden.errors, HasSubstr("no case 'tinny'; did you mean 'tiny'?"));
  const std::string scenario = std::string(LOCKSTEP_SOURCE_DIR) + "/scenarios/cp_equivalence.toml";
  EXPECT_EQ(lockstep({"plan", "--set", "model.seed=1", scenario, "-q"}).exit_code, 0);
}

TEST_F(Files, FilesWithoutTensorsAreNamed) {
  model::write_safetensors_file(path("a.safetensors"), {{"x", at::ones({3})}});
  golden::Hdf5Writer(path("none.h5")).commit();
  write("none.npz", std::string("PK\x05\x06") + std::string(18, '\0'));
  write("zero.npz", "");
  for (const char* name : {"none.h5", "none.npz"}) {
    expect_refused(
        lockstep({"compare", path(name), path("a.safetensors")}), 2, {name, "holds no tensors"});
  }
  expect_refused(
      lockstep({"compare", path("zero.npz"), path("a.safetensors")}), 2, {"zero.npz", "0 bytes"});
}

TEST_F(Files, InspectSaysOnStandardErrorWhatDoesNotFit) {
  const std::string folder = changed_model(
      kGate, [](const Tensor& gate) { return gate.narrow(0, 0, gate.size(0) - 1).contiguous(); });
  const Outcome outcome = lockstep({"inspect", folder});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.errors, HasSubstr("inspect: input error"));
  EXPECT_THAT(outcome.errors, HasSubstr(kGate));
  EXPECT_THAT(outcome.output, HasSubstr("problems"));
}

TEST_F(Files, WeightsThatAreNotFiniteAreNamedAndNeverPass) {
  const std::string folder = changed_model(kGate, [](Tensor gate) {
    gate.view(-1)[5] = std::numeric_limits<double>::quiet_NaN();
    gate.view(-1)[6] = std::numeric_limits<double>::infinity();
    return gate;
  });
  const std::string expected = std::string(kGate) + ": 1 NaN and 1 infinite";
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{}, {"--stream-layers"}, {"--topology", "cp=2"}}) {
    std::vector<std::string> words = {"logits",
                                      "--model",
                                      folder,
                                      "--docs",
                                      path("docs.json"),
                                      "--json",
                                      "--out",
                                      path("x.safetensors")};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = lockstep(words);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    EXPECT_THAT(outcome.errors, HasSubstr(expected));
    EXPECT_THAT(outcome.output, HasSubstr(expected));
    EXPECT_THAT(outcome.output, HasSubstr("\"loss\": \"NaN\""));
  }
  write("nan.toml",
        "[model]\ncheckpoint = \"model\"\n[data]\ndocuments = [7]\n[run.a]\n[run.b]\n"
        "recompute = true\n[[compare]]\nleft = \"a\"\nright = \"b\"\nlimit = 0\n");
  const Outcome run = lockstep({"run", path("nan.toml"), "--out", path("result")});
  EXPECT_EQ(run.exit_code, 1) << run.output;
  EXPECT_THAT(run.errors, HasSubstr(expected));
}

TEST_F(Files, GoldenListAndDiffTellEveryDamagedCase) {
  const fs::path data = fs::path(LOCKSTEP_SOURCE_DIR) / "golden" / "data";
  for (const char* part : {"MANIFEST.json", "one_kda", "one_dsa"}) {
    fs::create_directories(folder_ / "store");
    fs::copy(data / part, folder_ / "store" / part, fs::copy_options::recursive);
  }
  fs::resize_file(folder_ / "store" / "one_dsa" / "v1.h5", 1000);
  const Outcome list = lockstep({"golden", "list", "--data", path("store")});
  EXPECT_EQ(list.exit_code, 4);
  EXPECT_THAT(list.output, HasSubstr("file has 1000 bytes"));
  EXPECT_THAT(list.output, HasSubstr("file is missing"));
  const Outcome diff =
      lockstep({"golden", "diff", path("store"), "one_dsa", "one_kda", "--data", data.string()});
  EXPECT_EQ(diff.exit_code, 4);
  EXPECT_THAT(diff.output, HasSubstr("one_kda          same bytes"));
  EXPECT_THAT(diff.output, HasSubstr("cannot be compared"));
  EXPECT_THAT(diff.errors, HasSubstr("one_dsa"));
  EXPECT_EQ(lockstep({"golden", "diff", path("store"), "nope"}).exit_code, 4);
}

TEST_F(Files, DoctorSpeaksOfEveryPart) {
  const Outcome outcome = lockstep({"doctor"});
  for (const char* part : {"disk", "mpi", "hdf5", "cuda", "golden store", "golden python"}) {
    EXPECT_THAT(outcome.output, HasSubstr(part));
  }
}

}  // namespace
}  // namespace lockstep::harness
