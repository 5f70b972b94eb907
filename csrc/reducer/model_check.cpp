#include "reducer/model_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_set>

#include "reducer/group_reductions.h"

namespace ours {
namespace {

/// The FNV-1a hash cut to 62 bits, because both it and its negative must fit into an int64.
int64_t fingerprint(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return static_cast<int64_t>(hash >> 2U);
}

std::string describe(const at::Tensor& parameter) {
  std::string text = c10::str(parameter.scalar_type(), " ", parameter.sizes());
  if (parameter.layout() != at::kStrided) return c10::str(text, " ", parameter.layout());
  return parameter.is_contiguous() ? text : c10::str(text, " with strides ", parameter.strides());
}

/// One line for the number of parameters, then one line for each parameter's layout and one for its name.
std::string describe_model(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names) {
  std::string text = c10::str(parameters.size(), "\n");
  for (size_t i = 0; i < parameters.size(); ++i) {
    text += describe(parameters[i]) + "\n" + (i < names.size() ? names[i] : "") + "\n";
  }
  return text;
}

/// Only the layouts must agree. Names may differ, as those of a wrapped module do.
std::string layout_only(const std::vector<at::Tensor>& parameters) { return describe_model(parameters, {}); }

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> gather_texts(c10d::ProcessGroup& group, at::Device device, const std::string& mine) {
  const auto gather = [&](at::Tensor input) {
    std::vector<at::Tensor> inputs{input.to(device)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(at::zeros_like(inputs[0]));
    group.allgather(outputs, inputs)->wait();
    for (at::Tensor& output : outputs[0]) output = output.cpu();
    return outputs[0];
  };
  const auto lengths = gather(at::tensor({static_cast<int64_t>(mine.size())}, at::kLong));
  int64_t longest = 0;
  for (const at::Tensor& length : lengths) longest = std::max(longest, length.item<int64_t>());
  at::Tensor bytes = at::zeros({longest}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), mine.data(), mine.size());
  const auto all = gather(bytes);
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    texts.emplace_back(static_cast<const char*>(all[rank].const_data_ptr()), lengths[rank].item<int64_t>());
  }
  return texts;
}

/// Returns the name of the first parameter that only the longer description has. It is found by name, since the
/// additional layer may be in the middle, or by place if the names tell nothing, as those of a wrapped module do.
std::string first_only_in(const std::vector<std::string>& longer, const std::vector<std::string>& shorter) {
  std::unordered_set<std::string> known;
  for (size_t i = 2; i < shorter.size(); i += 2) known.insert(shorter[i]);
  std::vector<std::string> missing;
  for (size_t i = 2; i < longer.size(); i += 2) {
    if (known.count(longer[i]) == 0) missing.push_back(longer[i]);
  }
  if (2 * missing.size() == longer.size() - shorter.size()) return missing.front();
  return shorter.size() + 1 < longer.size() ? longer[shorter.size() + 1] : "";
}

/// Compares rank `other` with rank 0 line by line; returns an empty text if they agree.
std::string describe_difference(const std::vector<std::string>& zero, const std::vector<std::string>& other, int rank) {
  for (size_t i = 1; i + 1 < zero.size() && i + 1 < other.size(); i += 2) {
    if (zero[i] == other[i]) continue;
    const std::string name = zero[i + 1] == other[i + 1] ? zero[i + 1] : zero[i + 1] + " / " + other[i + 1];
    return c10::str("parameter ", i / 2, " (", name, ") is ", zero[i], " on rank 0, which appears not to match ",
                    other[i], " on rank ", rank);
  }
  if (zero[0] == other[0]) return {};
  const std::string name = zero.size() > other.size() ? first_only_in(zero, other) : first_only_in(other, zero);
  return c10::str("rank 0 has ", zero[0], " params, while rank ", rank, " has ", other[0],
                  "; the first that only one of them has is ", name);
}

}  // namespace

void check_same_model(c10d::ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names) {
  if (group.getSize() == 1 || parameters.empty()) return;
  const at::Device device = parameters.front().device();
  const int64_t print = fingerprint(layout_only(parameters));
  at::Tensor extremes = at::tensor({print, -print}, at::kLong).to(device);
  start_all_reduce(group, {extremes}, c10d::ReduceOp::MAX)->wait();
  extremes = extremes.cpu();
  // If the largest fingerprint equals the smallest, all are equal.
  if (extremes[0].item<int64_t>() == -extremes[1].item<int64_t>()) return;

  const auto texts = gather_texts(group, device, describe_model(parameters, names));
  const auto zero = split_lines(texts.front());
  std::string found;
  for (int rank = 1; rank < static_cast<int>(texts.size()); ++rank) {
    const std::string difference = describe_difference(zero, split_lines(texts[static_cast<size_t>(rank)]), rank);
    if (!difference.empty()) found += (found.empty() ? "" : "; ") + difference;
  }
  TORCH_CHECK(false, "DDP expects same model across all ranks, but ", found,
              ". Build the model from the same configuration on every rank.");
}

}  // namespace ours
