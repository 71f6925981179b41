// report.json, both ways. Each struct lists its fields once, in order, for an archive that either
// writes or reads them, so that the two cannot disagree.
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "harness/result/result.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};
template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

// JSON has no such numbers, and null would not tell them apart.
constexpr std::string_view kNan = "NaN", kPlusInfinity = "Infinity", kMinusInfinity = "-Infinity";

template <typename E>
constexpr auto enum_values() {
  if constexpr (std::is_same_v<E, Status>) {
    return std::array{
        Status::kPass, Status::kFail, Status::kSkipped, Status::kError, Status::kRecorded};
  } else if constexpr (std::is_same_v<E, Phase>) {
    return std::array{Phase::kLoad, Phase::kSetup, Phase::kRun, Phase::kCompare, Phase::kRecord};
  } else if constexpr (std::is_same_v<E, Bound>) {
    return std::array{Bound::kAtMost, Bound::kAtLeast};
  } else if constexpr (std::is_same_v<E, ChartKind>) {
    return std::array{ChartKind::kLayer,
                      ChartKind::kToken,
                      ChartKind::kSweep,
                      ChartKind::kTiming,
                      ChartKind::kHistogram,
                      ChartKind::kOther};
  } else {
    static_assert(std::is_same_v<E, ErrorKind>);
    return std::array{ErrorKind::kInput,
                      ErrorKind::kConfig,
                      ErrorKind::kShape,
                      ErrorKind::kMesh,
                      ErrorKind::kComm,
                      ErrorKind::kGolden,
                      ErrorKind::kInternal};
  }
}
template <typename E>
std::string_view enum_name(E value) {
  if constexpr (std::is_same_v<E, ErrorKind>) {
    return kind_name(value);
  } else {
    return name(value);
  }
}

template <typename Io>
void fields(Io& io, Attribute& a) {
  io("name", a.name), io("value", a.value);
}
template <typename Io>
void fields(Io& io, Measure& m) {
  io("name", m.name), io("value", m.value), io("unit", m.unit);
}
template <typename Io>
void fields(Io& io, Environment& e) {
  io("lockstep_version", e.lockstep_version), io("git_commit", e.git_commit);
  io("compiler", e.compiler), io("march", e.march), io("build_type", e.build_type);
  io("os", e.os), io("cpu_model", e.cpu_model), io("cores", e.cores), io("threads", e.threads);
  io("torch", e.torch), io("mpi", e.mpi), io("hdf5", e.hdf5), io("blas", e.blas);
  io("cuda", e.cuda), io("nccl", e.nccl), io("devices", e.devices), io("extra", e.extra);
}
template <typename Io>
void fields(Io& io, NumericsDifference& d) {
  io("id", d.id), io("name", d.name), io("value", d.value), io("baseline", d.baseline);
}
template <typename Io>
void fields(Io& io, RunRecord& r) {
  io("name", r.name), io("engine", r.engine), io("policy", r.policy), io("numerics", r.numerics);
  io("topology", r.topology), io("ranks", r.ranks), io("device", r.device);
  io("checkpoint", r.checkpoint), io("provenance", r.provenance);
  io("seconds", r.seconds), io("tokens", r.tokens), io("peak_bytes", r.peak_bytes);
  io("measures", r.measures), io("status", r.status), io("reason", r.reason);
}
template <typename Io>
void fields(Io& io, Series& s) {
  io("kind", s.kind), io("chart", s.chart), io("name", s.name);
  io("x_label", s.x_label), io("y_label", s.y_label), io("unit", s.unit);
  io("log_x", s.log_x), io("log_y", s.log_y), io("points", s.points), io("x_names", s.x_names);
  io("noise_floor", s.noise_floor), io("limit", s.limit);
}
template <typename Io>
void fields(Io& io, RankValue& r) {
  io("world_rank", r.world_rank), io("place", r.place), io("value", r.value), io("note", r.note);
}
template <typename Io>
void fields(Io& io, Detail& d) {
  io("name", d.name), io("metric", d.metric), io("value", d.value), io("limit", d.limit);
  io("noise_floor", d.noise_floor), io("unit", d.unit), io("status", d.status);
  io("note", d.note);
}
template <typename Io>
void fields(Io& io, Comparison& c) {
  io("left", c.left), io("right", c.right), io("what", c.what), io("metric", c.metric);
  io("value", c.value), io("limit", c.limit), io("bound", c.bound);
  io.derived("ratio", c.ratio());
  io("noise_floor", c.noise_floor), io("unit", c.unit), io("status", c.status);
  io("reason", c.reason), io("error_kind", c.error_kind);
  io("first_divergence", c.first_divergence), io("worst", c.worst), io("rank", c.rank),
      io("ranks", c.ranks);
  io("details", c.details);
}
template <typename Io>
void fields(Io& io, ScenarioResult& s) {
  io("name", s.name), io("description", s.description), io("file", s.file), io("tags", s.tags);
  io("expected", s.expected), io("status", s.status), io("phase", s.phase);
  io("reason", s.reason), io("error_kind", s.error_kind), io("seconds", s.seconds);
  io("runs", s.runs), io("comparisons", s.comparisons), io("series", s.series);
}
template <typename Io>
void fields(Io& io, Report& r) {
  io("title", r.title), io("verdict", r.verdict), io("status", r.status);
  io("exit_code", r.exit_code), io("started", r.started), io("seconds", r.seconds);
  io("command", r.command), io("seed", r.seed), io("environment", r.environment);
  io("scenarios", r.scenarios);
}

class Writer {
 public:
  explicit Writer(Json& object) : object_(object) { object_ = Json::object(); }

  template <typename T>
  void operator()(const char* key, const T& value) {
    if constexpr (IsOptional<T>::value) {
      if (value) object_[key] = convert(*value);
    } else {
      object_[key] = convert(value);
    }
  }
  void derived(const char* key, double value) {
    if (!std::isnan(value)) object_[key] = convert(value);
  }

  template <typename T>
  static Json convert(const T& value) {
    if constexpr (std::is_enum_v<T>) {
      return enum_name(value);
    } else if constexpr (std::is_same_v<T, double>) {
      if (std::isnan(value)) return kNan;
      if (std::isinf(value)) return value > 0 ? kPlusInfinity : kMinusInfinity;
      return value;
    } else if constexpr (std::is_same_v<T, Point>) {
      return Json::array({convert(value.x), convert(value.y)});
    } else if constexpr (IsVector<T>::value) {
      Json array = Json::array();
      for (const auto& item : value) array.push_back(convert(item));
      return array;
    } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
      return value;
    } else {
      Json object;
      Writer writer(object);
      fields(writer, const_cast<T&>(value));  // NOLINT: one list of fields serves both directions
      return object;
    }
  }

 private:
  Json& object_;
};

class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) wrong("an object", object, where_);
  }

  template <typename T>
  void operator()(const char* key, T& value) {
    const auto found = object_.find(key);
    if (found == object_.end()) return;
    const std::string place = where_ + "." + key;
    if constexpr (IsOptional<T>::value) {
      value = convert<typename T::value_type>(*found, place);
    } else {
      value = convert<T>(*found, place);
    }
  }
  void derived(const char* /*key*/, double /*value*/) {}

  template <typename T>
  static T convert(const Json& json, const std::string& place) {
    if constexpr (std::is_enum_v<T>) {
      std::string accepted;
      for (const T value : enum_values<T>()) {
        if (json.is_string() && json.get_ref<const std::string&>() == enum_name(value)) {
          return value;
        }
        accepted += (accepted.empty() ? "one of " : ", ") + std::string(enum_name(value));
      }
      wrong(accepted, json, place);
    } else if constexpr (std::is_same_v<T, double>) {
      if (json.is_number()) return json.get<double>();
      const std::string word = json.is_string() ? json.get<std::string>() : "";
      if (word == kNan) return std::numeric_limits<double>::quiet_NaN();
      if (word == kPlusInfinity) return std::numeric_limits<double>::infinity();
      if (word == kMinusInfinity) return -std::numeric_limits<double>::infinity();
      wrong("a number, \"NaN\", \"Infinity\" or \"-Infinity\"", json, place);
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!json.is_boolean()) wrong("true or false", json, place);
      return json.get<bool>();
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      if (!json.is_number_unsigned()) wrong("a whole number >= 0", json, place);
      return json.get<uint64_t>();
    } else if constexpr (std::is_integral_v<T>) {
      if (!json.is_number_integer()) wrong("a whole number", json, place);
      return json.get<T>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!json.is_string()) wrong("a string", json, place);
      return json.get<std::string>();
    } else if constexpr (std::is_same_v<T, Point>) {
      if (!json.is_array() || json.size() != 2) wrong("a pair [x, y]", json, place);
      return {convert<double>(json[0], place + "[0]"), convert<double>(json[1], place + "[1]")};
    } else if constexpr (IsVector<T>::value) {
      if (!json.is_array()) wrong("an array", json, place);
      T values;
      values.reserve(json.size());
      for (size_t i = 0; i < json.size(); ++i) {
        values.push_back(convert<typename T::value_type>(json[i], fmt::format("{}[{}]", place, i)));
      }
      return values;
    } else {
      T value;
      Reader reader(json, place);
      fields(reader, value);
      return value;
    }
  }

 private:
  [[noreturn]] static void wrong(std::string_view expected,
                                 const Json& json,
                                 const std::string& place) {
    std::string found = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (found.size() > 60) found = fmt::format("{}...", found.substr(0, 57));
    fail(ErrorKind::kInput,
         "{}: expected {}, found {}; write the report again with 'lockstep run' or restore the "
         "file",
         place,
         expected,
         found);
  }

  const Json& object_;
  std::string where_;
};

// Names come from files and devices and may hold any bytes; a report must not fail on them.
std::string dump_flat(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Numbers, words and pairs of numbers; not objects.
bool is_flat(const Json& json) {
  if (!json.is_array()) return !json.is_object();
  for (const Json& item : json) {
    if (item.is_object() || (item.is_array() && !item.empty() && item[0].is_structured())) {
      return false;
    }
  }
  return true;
}

/// Indented, with arrays of numbers in one line each: a series of 131072 points is one line, not
/// half a million.
void dump_to(std::string& out, const Json& json, size_t depth) {
  if (json.empty() || is_flat(json)) {
    out += dump_flat(json);
    return;
  }
  const std::string indent(depth + 1, ' ');
  const bool is_object = json.is_object();
  out += is_object ? "{" : "[";
  const char* separator = "\n";
  for (const auto& item : json.items()) {
    out += separator + indent;
    if (is_object) out += dump_flat(item.key()) + ": ";
    dump_to(out, item.value(), depth + 1);
    separator = ",\n";
  }
  out += fmt::format("\n{:{}}{}", "", depth, is_object ? "}" : "]");
}

std::string dump(const Json& json) {
  std::string out;
  dump_to(out, json, 0);
  out += '\n';
  return out;
}

Json parse(std::string_view text, std::string_view source) {
  try {
    Json json = Json::parse(text);
    model::check_json(text, source);  // of two equal keys one would be lost
    return json;
  } catch (const Json::parse_error& error) {
    fail(ErrorKind::kInput,
         "{}: not JSON (byte {} of {}): {}; the file is damaged or was cut off, write the report "
         "again",
         source,
         error.byte,
         text.size(),
         error.what());
  }
}

}  // namespace

std::string to_json(const Report& report) {
  Json json = Json::object();
  json["version"] = kReportVersion;
  json.update(Writer::convert(report));
  return dump(json);
}

std::string to_json(const ScenarioResult& scenario) { return dump(Writer::convert(scenario)); }

std::string to_json(const Comparison& comparison) { return dump(Writer::convert(comparison)); }

Report report_from_json(std::string_view text, std::string_view source) {
  const Json json = parse(text, source);
  const int version = json.is_object() && json.contains("version")
                          ? Reader::convert<int>(json["version"], std::string(source) + ".version")
                          : 0;
  LOCKSTEP_CHECK(version >= 1 && version <= kReportVersion,
                 kInput,
                 "{}: report version {} cannot be read, this program reads 1 to {}; use the "
                 "Lockstep that wrote it",
                 source,
                 version,
                 kReportVersion);
  return Reader::convert<Report>(json, std::string(source));
}

ScenarioResult scenario_from_json(std::string_view text, std::string_view source) {
  return Reader::convert<ScenarioResult>(parse(text, source), std::string(source));
}

}  // namespace lockstep::harness
