#include "model/ops/linear.hpp"

#include "model/base/parallel.hpp"
#include "model/ops/exact_rows.hpp"
#include "model/ops/linear_tiles.hpp"
#include "model/ops/op_support.hpp"
#include "model/ops/take_rows.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// c[m,n] = op(a) op(b) for contiguous matrices a and b in acc, c in any dtype.
void product(Op op_a, Op op_b, const Tensor& a, const Tensor& b, const Tensor& c, RowTiles rows) {
  const int64_t m = c.size(0), n = c.size(1), k = a.size(op_a == Op::kNone ? 1 : 0);
  const auto run = [&]<typename A, typename Out>(A, Out) {
    tiled_product<A, Out>(
        op_a, op_b, m, n, k, cdata<A>(a), a.size(1), cdata<A>(b), b.size(1), data<Out>(c), n, rows);
  };
  if (a.scalar_type() == at::kDouble) {
    run(double{}, double{});
  } else if (c.scalar_type() == at::kBFloat16) {
    run(float{}, Bf16{});
  } else {
    run(float{}, float{});
  }
}

/// Gradient buffers are computed in the operand's dtype where the product can store it directly.
Tensor product_as(at::ScalarType dtype,
                  Op op_a,
                  Op op_b,
                  const Tensor& a,
                  const Tensor& b,
                  int64_t m,
                  int64_t n,
                  RowTiles rows) {
  const at::ScalarType acc = a.scalar_type();
  const bool direct = dtype == acc || (acc == at::kFloat && dtype == at::kBFloat16);
  Tensor c = at::empty({m, n}, a.options().dtype(direct ? dtype : acc));
  product(op_a, op_b, a, b, c, rows);
  return direct ? c : c.to(dtype);
}

struct LinearInfo {
  at::ScalarType acc, out;
  RowTiles rows;
  ExactSum sum;  ///< with blocks: where the weight's gradient goes
  RowBlocks blocks;
};

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x_RK,
                        const Tensor& weight_NK,
                        const LinearInfo& info) {
    ctx->save_for_backward({x_RK, weight_NK});
    stash(ctx, info);
    return product_as(info.out,
                      Op::kNone,
                      Op::kTranspose,
                      x_RK.to(info.acc).contiguous(),
                      weight_NK.to(info.acc).contiguous(),
                      x_RK.size(0),
                      weight_NK.size(0),
                      info.rows);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const LinearInfo& info = stashed<LinearInfo>(ctx);
    const Tensor grad_RN = grads[0].to(info.acc).contiguous();
    Tensor dx, dweight;
    if (ctx->needs_input_grad(0)) {
      dx = product_as(x.scalar_type(),
                      Op::kNone,
                      Op::kNone,
                      grad_RN,
                      weight.to(info.acc).contiguous(),
                      x.size(0),
                      x.size(1),
                      info.rows);
    }
    if (ctx->needs_input_grad(1) && info.sum.defined()) {
      const Tensor x_acc = x.to(info.acc).contiguous();
      const int64_t n = weight.size(0), k = weight.size(1);
      info.sum.note(num_blocks(info.blocks),
                    exact_product_parallel(n,
                                           k,
                                           *info.blocks,
                                           cdata<float>(grad_RN),
                                           n,
                                           cdata<float>(x_acc),
                                           k,
                                           {info.sum.high(), info.sum.low(), k}));
    } else if (ctx->needs_input_grad(1)) {
      dweight = product_as(weight.scalar_type(),
                           Op::kTranspose,
                           Op::kNone,
                           grad_RN,
                           x.to(info.acc).contiguous(),
                           weight.size(0),
                           weight.size(1),
                           RowTiles::kLibrary);
    }
    return {dx, dweight, {}};
  }
};

void check_operands(const Tensor& x, const Weight& w, const char* what) {
  const Tensor& weight = w.value;
  LOCKSTEP_CHECK(weight.defined() && weight.dim() == 2,
                 kShape,
                 "{}: weight must be [out, in], got {}",
                 what,
                 describe(weight));
  LOCKSTEP_CHECK(x.defined() && x.dim() >= 1 && x.size(-1) == weight.size(1),
                 kShape,
                 "{}: x must end in weight's {} columns, got x {} and weight {}",
                 what,
                 weight.size(1),
                 describe(x),
                 describe(weight));
}

/// The device form. The library's product of bf16 operands adds in float32 too and rounds once.
Tensor library_product(const Tensor& x_RK,
                       const Tensor& weight,
                       at::ScalarType out,
                       at::ScalarType acc) {
  if (x_RK.scalar_type() == out && weight.scalar_type() == out) return at::matmul(x_RK, weight.t());
  return at::matmul(x_RK.to(acc), weight.to(acc).t()).to(out);
}

Tensor apply(const Tensor& x, const Weight& w, at::ScalarType out, const Numerics& num) {
  const Tensor& weight = w.value;
  const RowTiles rows =
      num.is<Switch::kGemmRows>("fixed-tiles") ? RowTiles::kFixed : RowTiles::kLibrary;
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  int64_t num_rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) num_rows *= sizes[i];
  const Tensor x_RK = x.reshape({num_rows, weight.size(1)});
  check_exact(w, num_rows, num, "linear");
  if (takes_device_form(x)) return library_product(x_RK, weight, out, num.acc()).reshape(sizes);
  return LinearFunction::apply(x_RK, weight, LinearInfo{num.acc(), out, rows, w.sum, w.blocks})
      .reshape(sizes);
}

class EmbeddingFunction : public torch::autograd::Function<EmbeddingFunction> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& ids,
                        const Tensor& weight_VD,
                        int64_t pad_id,
                        at::ScalarType act,
                        at::ScalarType acc,
                        const ExactSum& sum) {
    ctx->save_for_backward({ids});
    stash(ctx, sum);
    ctx->saved_data["pad_id"] = pad_id;
    ctx->saved_data["rows"] = weight_VD.size(0);
    ctx->saved_data["dtype"] = static_cast<int64_t>(weight_VD.scalar_type());
    ctx->saved_data["acc"] = static_cast<int64_t>(acc);
    return weight_VD.index_select(0, ids).to(act);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor ids = ctx->get_saved_variables()[0].contiguous();
    const auto acc = static_cast<at::ScalarType>(ctx->saved_data["acc"].toInt());
    const Tensor grad_TD = grads[0].to(acc).contiguous();
    const int64_t width = grad_TD.size(1), pad_id = ctx->saved_data["pad_id"].toInt();
    const ExactSum& sum = stashed<ExactSum>(ctx);
    if (sum.defined()) {
      add_exactly(ids, grad_TD, pad_id, sum);
      return {{}, {}, {}, {}, {}, {}};
    }
    Tensor dweight = at::zeros({ctx->saved_data["rows"].toInt(), width}, grad_TD.options());
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    if (takes_device_form(grad_TD)) {
      add_rows(dweight, ids, grad_TD);
      if (pad_id >= 0) dweight.select(0, pad_id).zero_();
      return {{}, dweight.to(dtype), {}, {}, {}, {}};
    }
    const auto add = [&]<typename A>(A) {
      const int64_t* id = cdata<int64_t>(ids);
      const A* g = cdata<A>(grad_TD);
      A* out = data<A>(dweight);
      // Parallel over columns, so that a row's tokens are added in their order.
      parallel_for(0, width, 64, [&](int64_t c0, int64_t c1) {
        for (int64_t t = 0; t < ids.size(0); ++t) {
          if (id[t] == pad_id) continue;
          for (int64_t c = c0; c < c1; ++c) out[id[t] * width + c] += g[t * width + c];
        }
      });
    };
    acc == at::kDouble ? add(double{}) : add(float{});
    return {{}, dweight.to(dtype), {}, {}, {}, {}};
  }

 private:
  static void add_exactly(const Tensor& ids,
                          const Tensor& grad_TD,
                          int64_t pad_id,
                          const ExactSum& sum) {
    const int64_t tokens = ids.size(0), width = grad_TD.size(1);
    const auto* id = cdata<int64_t>(ids);
    const auto* g = cdata<float>(grad_TD);
    double *high = sum.high(), *low = sum.low();
    Peak peak;
    parallel_for(0, width, 64, [&](int64_t c0, int64_t c1) {
      for (int64_t t = 0; t < tokens; ++t) {
        if (id[t] == pad_id) continue;
        const int64_t at = id[t] * width + c0;
        peak.add(exact_add(c1 - c0, g + t * width + c0, high + at, low + at));
      }
    });
    sum.note(tokens, peak.value());
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Weight& weight, const Numerics& num) {
  check_operands(x, weight, "linear");
  check_dtype(x, num.act(), "linear: x");
  check_weight_dtype(weight.value, num, "linear: weight");
  return apply(x, weight, num.act(), num);
}

Tensor linear_acc(const Tensor& x, const Weight& weight, const Numerics& num) {
  check_operands(x, weight, "linear_acc");
  LOCKSTEP_CHECK(x.is_floating_point() && weight.value.is_floating_point(),
                 kShape,
                 "linear_acc: operands must be floating point, got x {} and weight {}",
                 describe(x),
                 describe(weight.value));
  return apply(x, weight, num.acc(), num);
}

Tensor linear_reference(const Tensor& x, const Tensor& weight, const Numerics& num) {
  return at::matmul(x.to(num.acc()), weight.to(num.acc()).t()).to(num.act());
}

Tensor embedding(const Tensor& ids, const Weight& w, int64_t pad_id, const Numerics& num) {
  const Tensor& weight = w.value;
  check_shape(ids, {-1}, "embedding: ids");
  check_dtype(ids, at::kLong, "embedding: ids");
  check_shape(weight, {-1, -1}, "embedding: weight");
  const int64_t rows = weight.size(0);
  LOCKSTEP_CHECK(pad_id < rows,
                 kShape,
                 "embedding: pad_id {} is not a row of weight {}",
                 pad_id,
                 describe(weight));
  const Tensor flat = ids.cpu().contiguous();
  const int64_t* id = cdata<int64_t>(flat);
  for (int64_t t = 0; t < flat.size(0); ++t) {
    LOCKSTEP_CHECK(id[t] >= 0 && id[t] < rows,
                   kInput,
                   "embedding: token {} has id {}, outside the vocabulary of {}; check the "
                   "tokenizer or vocab_size",
                   t,
                   id[t],
                   rows);
  }
  check_exact(w, num, "embedding");
  return EmbeddingFunction::apply(
      flat.to(weight.device()), weight, pad_id, num.act(), num.acc(), w.sum);
}

}  // namespace lockstep::model
