// docs/faults.md and the names of tests list the same faults.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::set<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it)
    found.insert((*it)[1]);
  return found;
}

TEST(FaultCatalogue, EveryFaultOfThePageHasATestAndTheOtherWayRound) {
  const fs::path root = LOCKSTEP_SOURCE_DIR;
  const std::set<std::string> listed =
      matches(text_of(root / "docs" / "faults.md"), std::regex(R"(\n\| (B\d\d) \|)"));
  std::set<std::string> tested;
  for (const auto& entry : fs::recursive_directory_iterator(root / "tests")) {
    if (entry.path().extension() != ".cpp") continue;
    const std::string text = text_of(entry.path());
    static const std::regex name(R"(\nTEST(?:_[PF])?\(\w+,\s+(B\d\d)\w+)"),
        second(R"(\nTEST(?:_[PF])?\(\w+,\s+B\d\dAnd(B\d\d)\w+)");
    tested.merge(matches(text, name));
    tested.merge(matches(text, second));
  }
  ASSERT_GT(listed.size(), 20U) << "docs/faults.md has hardly any row";
  for (const std::string& id : listed)
    EXPECT_TRUE(tested.contains(id)) << id << " is in docs/faults.md, but no test bears its name";
  for (const std::string& id : tested)
    EXPECT_TRUE(listed.contains(id))
        << "a test bears the name of " << id << ", which is not in docs/faults.md";
}

}  // namespace
