// How the row of one run is laid over the ranks that share it.
#pragma once

#include <memory>
#include <vector>

#include "model/seams/sequence.hpp"
#include "parallel/mesh/mesh.hpp"

namespace lockstep::parallel {

struct SequencePlan {
  std::vector<int64_t> cuts;   ///< rank r holds rows [cuts[r], cuts[r + 1])
  int64_t begin = 0, end = 0;  ///< rows held here
  std::unique_ptr<model::SequenceSeam>
      seam;  ///< what layers call; must outlive every graph built with it

  /// Number of rows of each rank.
  [[nodiscard]] std::vector<int64_t> rows() const;
};

/// `cuts` empty: near-even. Throws kMesh when cuts do not fit the row and the mesh.
SequencePlan plan_sequence(const Mesh& mesh, int64_t tokens, std::vector<int64_t> cuts);

}  // namespace lockstep::parallel
