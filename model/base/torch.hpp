// The narrow part of LibTorch that Lockstep uses: tensors, their functions, and custom autograd
// functions. This file is the precompiled header; nothing includes torch/torch.h, which costs six
// times as much to compile.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "model/base/error.hpp"

namespace lockstep {

using at::Tensor;

/// "[3, 4] float32", for messages. An undefined tensor prints as "undefined".
std::string describe(const Tensor& tensor);

/// Name of a dtype as messages and files print it: "float64", "float32", "bfloat16", "int64", ...
std::string dtype_name(at::ScalarType dtype);

/// Throws kShape naming `what` unless `tensor` is defined and has exactly these sizes (-1 matches
/// any).
void check_shape(const Tensor& tensor, at::IntArrayRef sizes, std::string_view what);

/// Throws kShape naming `what` unless `tensor` has this dtype.
void check_dtype(const Tensor& tensor, at::ScalarType dtype, std::string_view what);

}  // namespace lockstep
