#include "model/ops/head.hpp"

#include "model/ops/exact_rows.hpp"
#include "model/ops/head_kernels.hpp"
#include "model/ops/linear.hpp"
#include "model/ops/op_support.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

HeadForm check_head(const Tensor& h,
                    const Tensor& weight,
                    int64_t vocab,
                    const Tensor& labels,
                    const HeadOptions& options,
                    const Numerics& num) {
  check_shape(h, {-1, -1}, "head: h");
  check_dtype(h, num.act(), "head: h");
  check_shape(weight, {-1, h.size(1)}, "head: weight");
  check_weight_dtype(weight, num, "head: weight");
  check_shape(labels, {h.size(0)}, "head: labels");
  check_dtype(labels, at::kLong, "head: labels");
  LOCKSTEP_CHECK(vocab >= 1, kShape, "head: the vocabulary is empty: {}", describe(weight));
  LOCKSTEP_CHECK(options.temperature > 0,
                 kConfig,
                 "head: temperature must be positive, got {}",
                 options.temperature);
  LOCKSTEP_CHECK(options.token_chunk >= 1,
                 kConfig,
                 "head: token_chunk must be at least 1, got {}",
                 options.token_chunk);
  const Tensor flat = labels.cpu().contiguous();
  const int64_t* label = cdata<int64_t>(flat);
  for (int64_t t = 0; t < flat.numel(); ++t) {
    LOCKSTEP_CHECK(label[t] >= -1 && label[t] < vocab,
                   kInput,
                   "head: token {} has label {}, outside the vocabulary of {} (-1 means none)",
                   t,
                   label[t],
                   vocab);
  }
  HeadForm form{};
  form.tokens = h.size(0);
  form.width = h.size(1);
  form.vocab = weight.size(0);
  form.round_logits = num.rounds<Switch::kHeadOutput>("bf16");
  form.form = num.is<Switch::kTemperature>("multiply") ? TemperatureForm::kMultiply
              : num.is<Switch::kTemperature>("divide") ? TemperatureForm::kDivide
                                                       : TemperatureForm::kRaw;
  form.temperature = options.temperature;
  form.tiles = num.is<Switch::kGemmRows>("fixed-tiles") ? RowTiles::kFixed : RowTiles::kLibrary;
  return form;
}

struct HeadInfo {
  HeadForm form;
  HeadOptions options;
  at::ScalarType acc;
  Tensor labels;
  ExactSum sum;  ///< with blocks: where the weight's gradient goes
  RowBlocks blocks;
};

/// Calls body(chunk's form, first token) for runs of token_chunk tokens; of whole blocks with an
/// exact sum.
template <typename F>
void for_each_chunk(const HeadInfo& info, F&& body) {
  const int64_t T = info.form.tokens, step = info.options.token_chunk;
  for (int64_t t = 0, end; t < T; t = end) {
    end = info.sum.defined() ? block_run_end(*info.blocks, t, step) : std::min(T, t + step);
    HeadForm chunk = info.form;
    chunk.tokens = end - t;
    body(chunk, t);
  }
}

/// dW of one chunk, added exactly.
void add_exactly(
    const HeadInfo& info, const HeadForm& chunk, int64_t t, const float* dlogits, const float* h) {
  const std::vector<int64_t> blocks = blocks_between(*info.blocks, t, t + chunk.tokens);
  info.sum.note(static_cast<int64_t>(blocks.size()),
                exact_product_parallel(chunk.vocab,
                                       chunk.width,
                                       blocks,
                                       dlogits,
                                       chunk.vocab,
                                       h,
                                       chunk.width,
                                       {info.sum.high(), info.sum.low(), chunk.width}));
}

template <typename F>
void with_acc(at::ScalarType acc, F&& f) {
  acc == at::kDouble ? f.template operator()<double>() : f.template operator()<float>();
}

class LogprobFunction : public torch::autograd::Function<LogprobFunction> {
 public:
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& h_TD,
                               const Tensor& weight_VD,
                               const HeadInfo& info) {
    const int64_t T = info.form.tokens, D = info.form.width;
    const Tensor h = h_TD.to(info.acc), weight = weight_VD.to(info.acc).contiguous();
    Tensor logprobs = at::empty({T}, h.options()), log_sum = at::empty({T}, h.options());
    Tensor entropy = at::empty({info.options.entropy ? T : 0}, h.options());
    with_acc(info.acc, [&]<typename A>() {
      for_each_chunk(info, [&](const HeadForm& chunk, int64_t t) {
        head_forward<A>(chunk,
                        cdata<A>(h) + t * D,
                        cdata<A>(weight),
                        cdata<int64_t>(info.labels) + t,
                        data<A>(logprobs) + t,
                        data<A>(log_sum) + t,
                        info.options.entropy ? data<A>(entropy) + t : nullptr);
      });
    });
    ctx->mark_non_differentiable({entropy});
    ctx->save_for_backward({h_TD, weight_VD, log_sum});
    stash(ctx, info);
    return {logprobs, entropy};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const HeadInfo& info = stashed<HeadInfo>(ctx);
    const int64_t T = info.form.tokens, D = info.form.width, V = info.form.vocab;
    const Tensor h = saved[0].to(info.acc), weight = saved[1].to(info.acc).contiguous();
    const Tensor dlogprobs = grads[0].contiguous();
    const bool need_h = ctx->needs_input_grad(0), need_weight = ctx->needs_input_grad(1);
    Tensor dh, dweight;
    if (need_h) dh = at::empty({T, D}, h.options());
    const bool exact = info.sum.defined();
    if (need_weight && !exact)
      dweight = T > 0 ? at::empty({V, D}, h.options()) : at::zeros({V, D}, h.options());
    int64_t longest = 0;
    for_each_chunk(
        info, [&](const HeadForm& chunk, int64_t) { longest = std::max(longest, chunk.tokens); });
    const Tensor dlogits = at::empty({longest, V}, h.options());
    with_acc(info.acc, [&]<typename A>() {
      for_each_chunk(info, [&](const HeadForm& chunk, int64_t t) {
        head_logit_gradient<A>(chunk,
                               cdata<A>(h) + t * D,
                               cdata<A>(weight),
                               cdata<int64_t>(info.labels) + t,
                               cdata<A>(saved[2]) + t,
                               cdata<A>(dlogprobs) + t,
                               data<A>(dlogits));
        if (need_h) {
          tiled_product<A, A>(Op::kNone,
                              Op::kNone,
                              chunk.tokens,
                              D,
                              V,
                              cdata<A>(dlogits),
                              V,
                              cdata<A>(weight),
                              D,
                              data<A>(dh) + t * D,
                              D,
                              info.form.tiles);
        }
        if constexpr (std::is_same_v<A, float>) {
          if (exact) add_exactly(info, chunk, t, cdata<A>(dlogits), cdata<A>(h) + t * D);
        }
        if (need_weight && !exact) {
          head_weight_gradient<A>(
              chunk, cdata<A>(dlogits), cdata<A>(h) + t * D, t > 0, data<A>(dweight));
        }
      });
    });
    return {need_h ? dh.to(saved[0].scalar_type()) : Tensor(),
            need_weight && !exact ? dweight.to(saved[1].scalar_type()) : Tensor(),
            {}};
  }
};

/// Logits of one chunk in acc, for the reference.
Tensor reference_logits(const Tensor& h,
                        const Tensor& weight,
                        const HeadForm& form,
                        const Numerics& num) {
  const Tensor z = at::matmul(h.to(num.acc()), weight.to(num.acc()).t());
  // A rounded logit is a bf16 tensor, and so is its gradient.
  return form.round_logits ? z.to(at::kBFloat16).to(num.acc()) : z;
}

}  // namespace

HeadOutput head_logprobs(const Tensor& h,
                         const Weight& weight,
                         const Tensor& labels,
                         const HeadOptions& options,
                         const Numerics& num) {
  const HeadForm form = check_head(h, weight.value, weight.value.size(0), labels, options, num);
  check_exact(weight, h.size(0), num, "head: weight");
  if (takes_device_form(h)) return head_logprobs_reference(h, weight.value, labels, options, num);
  const auto out = LogprobFunction::apply(
      h.contiguous(),
      weight.value,
      HeadInfo{form, options, num.acc(), labels.contiguous(), weight.sum, weight.blocks});
  return {out[0], options.entropy ? out[1] : Tensor()};
}

HeadOutput head_logprobs_reference(const Tensor& h,
                                   const Tensor& weight,
                                   const Tensor& labels,
                                   const HeadOptions& options,
                                   const Numerics& num) {
  const HeadForm form = check_head(h, weight, weight.size(0), labels, options, num);
  Tensor z_TV = reference_logits(h, weight, form, num);
  if (form.form == TemperatureForm::kMultiply) z_TV = z_TV * (1 / options.temperature);
  if (form.form == TemperatureForm::kDivide) z_TV = z_TV / options.temperature;
  const Tensor log_sum_T = at::logsumexp(z_TV, {1});
  const Tensor label_T = labels.to(h.device());
  const Tensor at_label_T = z_TV.gather(1, label_T.clamp_min(0).unsqueeze(1)).squeeze(1);
  HeadOutput out;
  out.logprobs = (at_label_T - log_sum_T).masked_fill(label_T < 0, 0);
  if (options.entropy) {
    const Tensor z = z_TV.detach();
    out.entropy = log_sum_T.detach() - (at::softmax(z, 1) * z).sum(1);
  }
  return out;
}

HeadPart head_part(const Tensor& h,
                   const Tensor& weight,
                   int64_t first,
                   int64_t vocab,
                   const Tensor& labels,
                   const HeadOptions& options,
                   const Numerics& num) {
  const at::NoGradGuard guard;
  const HeadForm form = check_head(h, weight, vocab, labels, options, num);
  const at::TensorOptions acc(num.acc());
  const HeadPart part{at::empty({form.tokens, head_panel_count(form.vocab), 3}, acc),
                      at::zeros({form.tokens}, acc)};
  if (form.vocab > 0) {
    const Tensor own = at::where(labels.lt(0), labels, labels - first).clamp_min(-1).contiguous();
    const Tensor wide_h = h.to(num.acc()).contiguous(),
                 wide_weight = weight.to(num.acc()).contiguous();
    with_acc(num.acc(), [&]<typename A>() {
      head_panels<A>(form,
                     cdata<A>(wide_h),
                     cdata<A>(wide_weight),
                     cdata<int64_t>(own),
                     false,
                     reinterpret_cast<PanelSums<A>*>(data<A>(part.panels)),
                     data<A>(part.label_logits));
    });
  }
  return {part.panels.transpose(0, 1).contiguous(), part.label_logits};
}

Tensor merge_head_parts(const Tensor& panels, const Tensor& label_logits, const Tensor& labels) {
  const at::NoGradGuard guard;
  check_shape(label_logits, {labels.size(0)}, "merge_head_parts: label_logits");
  check_shape(panels, {-1, labels.size(0), 3}, "merge_head_parts: panels");
  Tensor logprobs = label_logits.clone(), log_sum = at::empty_like(label_logits);
  const Tensor sums = panels.transpose(0, 1).contiguous(), flat = labels.contiguous();
  with_acc(panels.scalar_type(), [&]<typename A>() {
    head_merge<A>(labels.size(0),
                  panels.size(0),
                  reinterpret_cast<const PanelSums<A>*>(cdata<A>(sums)),
                  cdata<int64_t>(flat),
                  data<A>(logprobs),
                  data<A>(log_sum),
                  nullptr);
  });
  return logprobs;
}

Tensor head_logits(const Tensor& h, const Tensor& weight, const Numerics& num) {
  const at::NoGradGuard guard;
  return num.rounds<Switch::kHeadOutput>("bf16") ? linear(h, weight, num).to(num.acc())
                                                 : linear_acc(h, weight, num);
}

}  // namespace lockstep::model
