#include "reducer/model_check.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <sstream>

#include "common/siphash.h"
#include "reducer/group_reductions.h"

namespace ours {
namespace {

/// What has to be the same on all ranks, and the names for messages. Both run parallel to the parameters.
struct Model {
  std::vector<std::string> layouts;
  std::vector<std::string> names;
};

std::string layout_of(const at::Tensor& parameter) {
  std::ostringstream text;
  text << c10::getDtypeNames(parameter.scalar_type()).first << ' ' << parameter.sizes();
  if (parameter.layout() != at::kStrided) {
    text << ' ' << parameter.layout();
  } else if (!parameter.is_contiguous()) {
    text << " with strides " << parameter.strides();
  }
  return text.str();
}

std::string text_of(const Model& model) {
  std::string text;
  for (size_t index = 0; index < model.layouts.size(); ++index) {
    text += model.layouts[index] + '\n' + model.names[index] + '\n';
  }
  return text;
}

Model model_in(const std::string& text) {
  Model model;
  std::istringstream lines(text);
  for (std::string layout, name; std::getline(lines, layout) && std::getline(lines, name);) {
    model.layouts.push_back(layout);
    model.names.push_back(name);
  }
  return model;
}

/// The same on all ranks if their layouts are, and hardly ever otherwise. Its negative fits into 64 bits, too.
int64_t fingerprint_of(const Model& model) {
  std::string text;
  for (const std::string& layout : model.layouts) text += layout + '\n';
  return static_cast<int64_t>(siphash({}, text.data(), text.size()) & std::numeric_limits<int64_t>::max());
}

/// Every rank's text, by rank.
std::vector<std::string> gather_texts(c10d::ProcessGroup& group, const std::string& own, at::Device device) {
  std::vector<size_t> sizes;
  for (const at::Tensor& size : gather(group, at::tensor({static_cast<int64_t>(own.size())}).to(device))) {
    sizes.push_back(static_cast<size_t>(size.item<int64_t>()));
  }
  // All ranks pass tensors of one size.
  const size_t longest = *std::max_element(sizes.begin(), sizes.end());
  at::Tensor bytes = at::zeros({static_cast<int64_t>(longest)}, at::kByte);
  std::memcpy(bytes.data_ptr(), own.data(), own.size());
  std::vector<std::string> texts;
  for (const at::Tensor& text : gather(group, bytes.to(device))) {
    texts.emplace_back(static_cast<const char*>(text.cpu().data_ptr()), sizes[texts.size()]);
  }
  return texts;
}

/// The first name that only `longer` has, or if names do not tell, the one after the end of `shorter`.
std::string first_only_in(const std::vector<std::string>& longer, const std::vector<std::string>& shorter) {
  const std::set<std::string> known(shorter.begin(), shorter.end());
  std::vector<std::string> missing;
  std::copy_if(longer.begin(), longer.end(), std::back_inserter(missing),
               [&](const std::string& name) { return known.count(name) == 0; });
  return missing.size() == longer.size() - shorter.size() ? missing.front() : longer.at(shorter.size());
}

/// How the model of `rank` differs from rank 0's; empty if it does not.
std::string difference(const Model& zero, const Model& other, size_t rank) {
  std::ostringstream text;
  const size_t counts[] = {zero.layouts.size(), other.layouts.size()};
  for (size_t index = 0; index < std::min(counts[0], counts[1]); ++index) {
    if (zero.layouts[index] == other.layouts[index]) continue;
    const bool same = zero.names[index] == other.names[index];
    text << "parameter " << index << " (" << zero.names[index] << (same ? "" : " / " + other.names[index]) << ") is "
         << zero.layouts[index] << " on rank 0, which appears not to match " << other.layouts[index] << " on rank "
         << rank;
    return text.str();
  }
  if (counts[0] == counts[1]) return "";
  const bool zero_has_more = counts[0] > counts[1];
  text << "rank 0 has " << counts[0] << " params, while rank " << rank << " has " << counts[1]
       << "; the first that only one of them has is "
       << first_only_in((zero_has_more ? zero : other).names, (zero_has_more ? other : zero).names);
  return text.str();
}

}  // namespace

void check_same_model(c10d::ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names) {
  if (group.getSize() == 1 || parameters.empty()) return;
  Model own{{}, names};
  std::transform(parameters.begin(), parameters.end(), std::back_inserter(own.layouts), layout_of);
  const int64_t fingerprint = fingerprint_of(own);
  const at::Device device = parameters.front().device();
  const at::Tensor extremes = at::tensor({fingerprint, -fingerprint}).to(device);
  start_all_reduce(group, {extremes}, c10d::ReduceOp::MAX)->wait();
  const at::Tensor seen = extremes.cpu();
  if (seen[0].item<int64_t>() == -seen[1].item<int64_t>()) return;
  std::vector<Model> models;
  for (const std::string& text : gather_texts(group, text_of(own), device)) models.push_back(model_in(text));
  std::string differences;
  for (size_t rank = 0; rank < models.size(); ++rank) {
    const std::string found = difference(models[0], models[rank], rank);
    if (!found.empty()) differences += (differences.empty() ? "" : "; ") + found;
  }
  TORCH_CHECK(false, "DDP expects same model across all ranks, but ", differences,
              ". Build the model from the same configuration on every rank.");
}

}  // namespace ours
