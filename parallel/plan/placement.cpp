#include "parallel/plan/placement.hpp"

#include <algorithm>

#include "model/layers/parameter_policy.hpp"

namespace lockstep::parallel {
namespace {

bool splits_sums(const model::Numerics& num) { return num.is<model::Switch::kTpPartialSums>("tp"); }

const model::Parameter& find(const std::vector<model::Parameter>& all, const std::string& name) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.name == name; });
  LOCKSTEP_CHECK(found != all.end(), kInternal, "placement: the model has no {}", name);
  return *found;
}

}  // namespace

std::vector<int64_t> Placement::shape() const {
  std::vector<int64_t> s = parameter.shape;
  s[0] = last - first;
  return slice.shape(std::move(s));
}

std::vector<Run> runs(const Placement& placement, int64_t begin, int64_t end) {
  const std::vector<int64_t>& whole = placement.parameter.shape;
  const auto product = [&](size_t from, size_t to) {
    int64_t count = 1;
    for (size_t d = from; d < to; ++d) count *= whole[d];
    return count;
  };
  std::vector<Run> result;
  int64_t part = 0;
  const auto add = [&](int64_t at, int64_t count) {
    if (count <= 0) return;
    result.push_back({at, part, count});
    part += count;
  };
  const int64_t row = product(1, whole.size());
  if (placement.slice.dim < 0) {
    add((placement.first + begin) * row, (end - begin) * row);
  } else if (placement.slice.dim == 0) {
    int64_t before = 0;  // rows of the part in earlier ranges
    for (const auto& [from, to] : placement.slice.ranges) {
      const int64_t first = std::max(begin - before, int64_t{0}),
                    last = std::min(end - before, to - from);
      if (first < last) add((placement.first + from + first) * row, (last - first) * row);
      before += to - from;
    }
  } else {
    const auto dim = static_cast<size_t>(placement.slice.dim);
    const int64_t middle = product(1, dim), inner = product(dim + 1, whole.size());
    for (int64_t r = (placement.first + begin) * middle; r < (placement.first + end) * middle;
         ++r) {
      for (const auto& [from, to] : placement.slice.ranges)
        add((r * whole[dim] + from) * inner, (to - from) * inner);
    }
  }
  return result;
}

std::vector<int64_t> expert_cuts(const model::ModelConfig& config,
                                 const model::Topology& topology) {
  return even_cuts(config.n_routed_experts, topology.ep);
}

Placement place_parameter(const model::ModelConfig& config,
                          const model::Numerics& num,
                          const model::Topology& topology,
                          const Coordinates& place,
                          const model::Parameter& parameter) {
  Placement result{parameter, 0, parameter.shape[0], {}};
  if (parameter.expert) {
    result.first = config.n_routed_experts * place.ep / topology.ep;
    result.last = config.n_routed_experts * (place.ep + 1) / topology.ep;
  }
  const bool kda = parameter.layer >= 0 &&
                   config.mixers[static_cast<size_t>(parameter.layer)] == model::MixerKind::kKda;
  result.slice = tp_slice(parameter.name,
                          result.shape(),
                          {.kda = kda,
                           .kda_heads = config.linear_num_heads,
                           .kda_dim = config.linear_head_dim,
                           .mla_heads = config.num_attention_heads,
                           .nope_dim = config.qk_nope_head_dim,
                           .v_dim = config.v_head_dim},
                          place.tp,
                          topology.tp,
                          splits_sums(num));
  return result;
}

namespace {

ParamSpec spec_of(const Placement& placed,
                  const model::ModelConfig& config,
                  const model::Numerics& num) {
  const model::Parameter& parameter = placed.parameter;
  ParamSpec spec;
  spec.name = parameter.name;
  spec.expert = parameter.expert;
  spec.shape = placed.shape();
  spec.compute_dtype = model::parameter_dtype(parameter.name, num);
  spec.tp_split = placed.slice.dim >= 0;
  spec.trainable = !parameter.frozen && !parameter.buffer;
  spec.unit = parameter.layer >= 0                   ? parameter.layer
              : parameter.name.starts_with("embed_") ? model::kStemUnit
                                                     : model::head_unit(config.num_hidden_layers);
  if (config.tie_word_embeddings && parameter.name == "embed_tokens.weight")
    spec.alias = "lm_head.weight";
  return spec;
}

std::vector<Placement> placements(const model::ModelConfig& config,
                                  const model::Numerics& num,
                                  const model::Topology& topology,
                                  const Coordinates& place) {
  std::vector<Placement> all;
  for (const model::Parameter& parameter : model::expected_parameters(config)) {
    if (config.tie_word_embeddings && parameter.name == "lm_head.weight") continue;
    all.push_back(place_parameter(config, num, topology, place, parameter));
  }
  return all;
}

}  // namespace

std::vector<ParamSpec> parameter_specs(const model::ModelConfig& config,
                                       const model::Numerics& num,
                                       const model::Topology& topology,
                                       const Coordinates& place) {
  std::vector<ParamSpec> specs;
  for (const Placement& placed : placements(config, num, topology, place))
    specs.push_back(spec_of(placed, config, num));
  return specs;
}

std::vector<ParamSpec> parameter_specs(const model::WeightSource& source,
                                       const model::Numerics& num,
                                       const Mesh& mesh) {
  const model::ModelConfig& config = source.config();
  std::vector<ParamSpec> specs;
  for (const Placement& placed : placements(config, num, mesh.topology(), mesh.place())) {
    ParamSpec spec = spec_of(placed, config, num);
    spec.load_rows = [&source, placed](int64_t begin, int64_t end) {
      const std::string& name = placed.parameter.name;
      Tensor rows;
      if (placed.slice.dim < 0) {
        rows = source.load_rows(name, placed.first + begin, placed.first + end).clone();
      } else {
        rows = placed.of(source.load(name)).narrow(0, begin, end - begin).clone();
      }
      source.release(name);
      return rows;
    };
    specs.push_back(std::move(spec));
  }
  return specs;
}

Tensor gather_whole(const ShardedParameters& params,
                    const Shard& shard,
                    const Tensor& rows,
                    const model::ModelConfig& config,
                    const model::Numerics& num,
                    const Mesh& mesh) {
  const model::Topology& topology = mesh.topology();
  const model::Parameter parameter = find(model::expected_parameters(config), shard.spec.name);
  const auto flat = [&](const Group& group, const Tensor& part, auto&& shape_of, auto&& place_in) {
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < group.size(); ++r) {
      int64_t count = 1;
      for (const int64_t s : shape_of(r)) count *= s;
      counts.push_back(count);
    }
    const Tensor all = group.all_gather_rows(part.contiguous().view({-1}), counts, shard.spec.name);
    int64_t at = 0;
    for (int64_t r = 0; r < group.size(); ++r) {
      const auto count = counts[static_cast<size_t>(r)];
      place_in(r, all.narrow(0, at, count).view(shape_of(r)));
      at += count;
    }
  };
  Coordinates place = mesh.place();
  const auto placed_at = [&](int64_t tp, int64_t ep) {
    Coordinates c = place;
    c.tp = tp;
    c.ep = ep;
    return place_parameter(config, num, topology, c, parameter);
  };

  Tensor part = params.gather(shard, rows);
  if (placed_at(place.tp, place.ep).slice.dim >= 0) {
    // Slices of tp into this ep rank's rows.
    Placement mine = placed_at(place.tp, place.ep);
    std::vector<int64_t> shape = parameter.shape;
    shape[0] = mine.last - mine.first;
    Tensor joined = at::empty(shape, part.options());
    flat(
        mesh.tp(),
        part,
        [&](int64_t r) { return placed_at(r, place.ep).shape(); },
        [&](int64_t r, const Tensor& piece) {
          const TpSlice slice = placed_at(r, place.ep).slice;
          int64_t at = 0;
          for (const auto& [begin, end] : slice.ranges) {
            joined.narrow(slice.dim, begin, end - begin)
                .copy_(piece.narrow(slice.dim, at, end - begin));
            at += end - begin;
          }
        });
    part = joined;
  }
  if (!parameter.expert || topology.ep == 1) return part;
  const std::vector<int64_t> cuts = expert_cuts(config, topology);
  std::vector<int64_t> counts;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) counts.push_back(cuts[r + 1] - cuts[r]);
  return mesh.ep().all_gather_rows(part.contiguous(), counts, shard.spec.name);
}

}  // namespace lockstep::parallel
