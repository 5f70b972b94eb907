#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "backend/descriptions.h"
#include "backend/tensors.h"
#include "common/error.h"

// all_reduce of sparse COO tensors: every rank gathers the entries of all ranks, in the order of ranks, and adds them
// up. The amount of data is that of the entries, however large the dense tensor would be.

namespace ours {

namespace {

constexpr int64_t kMaxDims = 32;

/// What a rank has to know of another one's tensor before it can receive its entries.
struct Shape {
  int64_t entries;
  int64_t sparse_dims;
  int64_t dims;
  int64_t sizes[kMaxDims];
};

Shape shape_of(const at::Tensor& tensor) {
  Shape shape{};
  shape.entries = tensor._nnz();
  shape.sparse_dims = tensor.sparse_dim();
  shape.dims = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), shape.sizes);
  return shape;
}

std::string describe(const Shape& shape) {
  std::string text = "(";
  for (int64_t i = 0; i < shape.dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape.sizes[i]);
  return text + ") with " + std::to_string(shape.sparse_dims) + " sparse dimensions";
}

std::vector<Shape> gather_shapes(Group& group, const Call& call, const Shape& mine) {
  std::vector<Shape> shapes(static_cast<size_t>(group.size()));
  std::vector<Span> spans;
  for (Shape& shape : shapes) spans.push_back({&shape, sizeof(Shape)});
  group.all_gather(call, {&mine, sizeof(Shape)}, spans);
  for (size_t r = 1; r < shapes.size(); ++r) {
    const Shape& first = shapes.front();
    const Shape& other = shapes[r];
    if (first.dims == other.dims && first.sparse_dims == other.sparse_dims &&
        std::equal(first.sizes, first.sizes + kMaxDims, other.sizes)) {
      continue;
    }
    throw MismatchError("all_reduce of sparse tensors of different shapes: rank 0 has " + describe(first) + ", rank " +
                        std::to_string(r) + " has " + describe(other) + ". Give all ranks the same shape");
  }
  return shapes;
}

/// For each rank, a tensor like `mine` except that dimension `dim` has that rank's number of entries.
std::vector<at::Tensor> gather_parts(Group& group, const Call& call, const at::Tensor& mine, int64_t dim,
                                     const std::vector<Shape>& shapes) {
  std::vector<at::Tensor> parts;
  std::vector<Span> spans;
  for (const Shape& shape : shapes) {
    auto sizes = mine.sizes().vec();
    sizes[static_cast<size_t>(dim)] = shape.entries;
    parts.push_back(at::empty(sizes, mine.options()));
    spans.push_back(span(parts.back()));
  }
  Call one = call;
  one.dtype = dtype_of(mine);
  group.all_gather(one, const_span(mine), spans);
  return parts;
}

void all_reduce_sparse(Group& group, const Call& call, const at::Tensor& input, const at::Tensor& tensor,
                       bool average) {
  const std::vector<Shape> shapes = gather_shapes(group, call, shape_of(input));
  const at::Tensor indices = at::cat(gather_parts(group, call, contiguous_source(input._indices()), 1, shapes), 1);
  const at::Tensor values = at::cat(gather_parts(group, call, contiguous_source(input._values()), 0, shapes), 0);
  at::Tensor sum = at::_sparse_coo_tensor_unsafe(indices, values, input.sizes(), input.options()).coalesce();
  if (average) sum._values().div_(group.size());
  copy_below_autograd(tensor, sum);
}

}  // namespace

Collective describe_all_reduce_sparse(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(me, tensors, "input");
  const c10d::ReduceOp::RedOpType op = opts.reduceOp.op_;
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse, me.call, ": the tensor has layout ", tensor.layout(),
                    "; pass a sparse_coo tensor");
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu(), me.call, ": the tensor is on ", tensor.device(),
      ", but sparse tensors are reduced on the cpu only; move it with .cpu(), or make it dense with .to_dense()");
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, me.call,
                    ": a sparse tensor can be reduced with SUM and AVG only; for other operations use .to_dense()");
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || tensor.is_floating_point() || tensor.is_complex(), me.call,
                    ": AVG of a sparse tensor is for floating point and complex numbers only, not ",
                    tensor.scalar_type(), "; use SUM");
  TORCH_CHECK_VALUE(tensor.dim() <= kMaxDims, me.call, ": the sparse tensor has ", tensor.dim(),
                    " dimensions; at most ", kMaxDims, " are supported");
  const DType dtype = dtype_of(tensor);
  const bool average = op == c10d::ReduceOp::AVG;
  at::Tensor input = tensor.detach().coalesce();
  return {dtype, {tensor}, {{tensor}}, [input, tensor, average](Group& group, const Call& call) {
            all_reduce_sparse(group, call, input, tensor, average);
          }};
}

}  // namespace ours
