#include "reducer/backward_timeline.h"

#include <string>

#include "common/timeline.h"

namespace ours {

namespace {

std::string number(const char* name, int64_t value) { return timeline::quoted(name) + ":" + std::to_string(value); }

std::string names_of(const std::vector<size_t>& parameters, const ReducerOptions& options) {
  std::string text;
  for (const size_t index : parameters) {
    text += (text.empty() ? "" : ",") + timeline::quoted(options.name_of(index));
  }
  return '[' + text + ']';
}

/// "bucket 2: layer3.weight to layer1.bias"
std::string title(size_t bucket, const std::vector<size_t>& parameters, const ReducerOptions& options) {
  std::string text = "bucket " + std::to_string(bucket);
  if (parameters.empty()) return text;
  text += ": " + options.name_of(parameters.front());
  return parameters.size() == 1 ? text : text + " to " + options.name_of(parameters.back());
}

void add_layout(const BucketLayout& layout, const ReducerOptions& options) {
  std::string arguments;
  for (size_t i = 0; i < layout.parameters.size(); ++i) {
    timeline::name_track(timeline::kBucketTracks + static_cast<int64_t>(i), title(i, layout.parameters[i], options));
    arguments += (i == 0 ? "" : ",") + timeline::quoted("bucket " + std::to_string(i)) + ":" +
                 names_of(layout.parameters[i], options);
  }
  timeline::mark("buckets", "the model's buckets", arguments);
}

void add_bucket(size_t index, int64_t bytes, const BucketTimes& times, int64_t exposed, int64_t iteration) {
  const auto track = timeline::kBucketTracks + static_cast<int64_t>(index);
  const std::string facts = number("iteration", iteration) + "," + number("bucket", static_cast<int64_t>(index)) + "," +
                            number("bytes", bytes);
  if (times.first_gradient >= 0 && times.last_gradient >= times.first_gradient) {
    timeline::add("bucket", "gradients", {times.first_gradient, times.last_gradient}, facts, track);
  }
  if (times.reduction_began < 0 || times.reduction_ended < times.reduction_began) return;
  timeline::add("bucket", "reduction", {times.reduction_began, times.reduction_ended},
                facts + "," + number("queued_ns", times.reduction_began - times.launched) + "," +
                    number("exposed_ns", exposed) + R"(,"end_is_exact":)" + (times.end_is_exact ? "true" : "false"),
                track);
}

}  // namespace

void BackwardTimeline::add(const BackwardTimes& times, const ReducerOptions& options) {
  if (!timeline::is_on()) return;
  const BucketLayout& layout = *times.layout;
  if (named_ != times.layout || named_in_ != timeline::session()) add_layout(layout, options);
  named_ = times.layout;
  named_in_ = timeline::session();
  const std::string step = number("iteration", times.iteration);
  const auto add = [&](const char* name, int64_t began, int64_t ended) {
    if (began >= 0 && ended >= began) timeline::add("step", name, {began, ended}, step, timeline::kModelTrack);
  };
  add("forward", times.forward_began, times.began);
  add("backward", times.began, times.ended);
  add("computation of gradients", times.began, times.compute_ended);
  add("exposed communication", times.compute_ended, times.ended);
  const std::vector<int64_t> exposed = exposed_times(times);
  for (size_t i = 0; i < times.buckets.size(); ++i) {
    add_bucket(i, layout.bytes[i], times.buckets[i], exposed[i], times.iteration);
  }
}

}  // namespace ours
