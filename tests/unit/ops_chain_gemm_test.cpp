// Products whose bits do not depend on tiling or vector width.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "model/base/seeded.hpp"
#include "model/ops/chain_gemm.hpp"

namespace lockstep::model {
namespace {

template <typename T>
std::vector<T> values(std::string_view name, int64_t count) {
  const std::vector<float> x = seeded_uniform(3, name, count);
  return {x.begin(), x.end()};
}

template <typename T>
void compare_with_written_chain() {
  for (const int64_t m : {0, 1, 2, 3, 5, 8, 13, 31}) {
    for (const int64_t n : {1, 7, 8, 16, 17, 33, 64, 67}) {
      for (const int64_t k : {0, 1, 5, 192, 193, 400}) {
        for (const bool indexed : {false, true}) {
          for (const bool accumulate : {false, true}) {
            const std::vector<T> a = values<T>("a", m * k + 1), b = values<T>("b", (k + 3) * n);
            std::vector<T> c = values<T>("c", m * (n + 3) + 1);
            std::vector<int32_t> rows;
            for (int64_t l = 0; l < k; ++l)
              rows.push_back(static_cast<int32_t>((l * 7 + 2) % (k + 3)));
            std::vector<T> want = c;
            for (int64_t i = 0; i < m; ++i) {
              for (int64_t j = 0; j < n; ++j) {
                T& x = want[static_cast<size_t>(i * (n + 3) + j)];
                if (!accumulate) x = 0;
                for (int64_t l = 0; l < k; ++l) {
                  const int64_t row = indexed ? rows[static_cast<size_t>(l)] : l;
                  x = std::fma(
                      a[static_cast<size_t>(i * k + l)], b[static_cast<size_t>(row * n + j)], x);
                }
              }
            }
            for (const bool wide : {true, false}) {
              std::vector<T> got = c;
              chain_gemm_allow_avx512(wide);
              chain_gemm<T>(m,
                            n,
                            k,
                            {a.data(), k},
                            {b.data(), n, indexed ? rows.data() : nullptr},
                            got.data(),
                            n + 3,
                            accumulate);
              ASSERT_EQ(got, want)
                  << m << " " << n << " " << k << " " << indexed << accumulate << wide;
            }
          }
        }
      }
    }
  }
  chain_gemm_allow_avx512(true);
}

TEST(ChainGemm, EqualsTheWrittenChainBitForBitInFloat32AtBothWidths) {
  compare_with_written_chain<float>();
}
TEST(ChainGemm, EqualsTheWrittenChainBitForBitInFloat64AtBothWidths) {
  compare_with_written_chain<double>();
}

TEST(ChainGemm, KeepsTheLastBitsOfAFloat32Factor) {
  // 1 + 2^-12 needs more bits than reduced-precision matrix modes keep.
  const float a = 1.0F + std::ldexp(1.0F, -12), b = 1.0F;
  float c = 0;
  chain_gemm<float>(1, 1, 1, {&a, 1}, {&b, 1}, &c, 1, false);
  EXPECT_EQ(c, 1.000244140625F);
}

TEST(ChainGemm, GathersRowsAsColumns) {
  for (const int64_t count : {0, 1, 8, 19}) {
    for (const int64_t width : {1, 8, 13, 64}) {
      const std::vector<double> x = values<double>("x", 40 * width);
      const std::vector<float> y(x.begin(), x.end());
      std::vector<int32_t> index;
      for (int64_t i = 0; i < count; ++i) index.push_back(static_cast<int32_t>((i * 11 + 3) % 40));
      std::vector<double> out(static_cast<size_t>(width * (count + 2)), -9.0);
      std::vector<float> out_f(out.size(), -9.0F);
      gather_transposed<double>(x.data(), width, index.data(), count, width, out.data(), count + 2);
      gather_transposed<float>(
          y.data(), width, index.data(), count, width, out_f.data(), count + 2);
      for (int64_t j = 0; j < width; ++j) {
        for (int64_t i = 0; i < count + 2; ++i) {
          const auto at = static_cast<size_t>(j * (count + 2) + i);
          const double want =
              i < count ? x[static_cast<size_t>(index[static_cast<size_t>(i)] * width + j)] : -9.0;
          ASSERT_EQ(out[at], want);
          ASSERT_EQ(out_f[at], static_cast<float>(want));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::model
