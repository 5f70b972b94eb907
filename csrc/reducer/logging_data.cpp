#include "reducer/logging_data.h"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace ours {
namespace {

using Event = StepTimer::Event;

std::string joined_buckets(const std::vector<std::vector<size_t>>& buckets) {
  std::vector<std::string> texts;
  for (const auto& bucket : buckets) texts.push_back(c10::Join(" ", bucket));
  return c10::Join(", ", texts);
}

}  // namespace

void LoggingData::log_construction(const ConstructionFacts& facts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& strings = data_.strs_map;
  auto& integers = data_.ints_map;
  strings["module_name"] = facts.module_name;
  strings["device_ids"] = c10::Join(", ", facts.device_ids);
  for (const auto& [key, text] : facts.texts) strings[key] = text;
  for (const auto& [key, number] : facts.numbers) integers[key] = number;
  integers["output_device"] = facts.output_device;
  integers["broadcast_buffers"] = facts.broadcast_buffers ? 1 : 0;
  integers["has_sync_bn"] = facts.has_sync_bn ? 1 : 0;
  if (facts.static_graph) integers["static_graph"] = 1;
  add_construction_sizes();
  c10::LogPyTorchDDPUsage(data_);
}

void LoggingData::add_construction_sizes() {
  auto& integers = data_.ints_map;
  const ReducerOptions& options = reducer_->options();
  const auto& parameters = reducer_->parameters();
  std::set<std::string> dtypes;
  int64_t bytes = 0;
  bool several_devices = false;
  for (const at::Tensor& parameter : parameters) {
    dtypes.insert(std::string(c10::scalarTypeToTypeMeta(parameter.scalar_type()).name()));
    bytes += static_cast<int64_t>(parameter.nbytes());
    several_devices = several_devices || parameter.device() != parameters.front().device();
  }
  data_.strs_map["dtypes"] = c10::Join(", ", std::vector<std::string>(dtypes.begin(), dtypes.end()));
  data_.strs_map["bucket_sizes"] = c10::Join(", ", reducer_->status().bucket_bytes);
  data_.strs_map["backend_name"] = reducer_->group()->getBackendName();
  integers["world_size"] = reducer_->group()->getSize();
  integers["rank"] = reducer_->group()->getRank();
  integers["iteration"] = 0;
  integers["num_parameter_tensors"] = static_cast<int64_t>(parameters.size());
  integers["total_parameter_size_bytes"] = bytes;
  integers["is_multi_device_module"] = several_devices ? 1 : 0;
  integers["bucket_cap_bytes"] = options.bucket_bytes_cap;
  integers["find_unused_parameters"] = options.find_unused_parameters ? 1 : 0;
  integers["gradient_as_bucket_view"] = options.gradient_as_bucket_view ? 1 : 0;
}

void LoggingData::log_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reducer_->timer().samples(reducer_->iterations())) return;
  const ReducerStatus status = reducer_->status();
  auto& integers = data_.ints_map;
  ++samples_;
  integers["iteration"] = status.iterations;
  integers["num_buckets_reduced"] = status.buckets_reduced;
  integers["num_gradients_reduced_in_place"] = status.reduced_in_place;
  integers["has_rebuilt_buckets"] = status.has_rebuilt_buckets ? 1 : 0;
  int64_t unused_bytes = 0;
  for (const size_t index : status.unused_parameters) {
    unused_bytes += static_cast<int64_t>(reducer_->parameters()[index].nbytes());
  }
  integers["unused_parameter_size"] = unused_bytes;
  if (status.has_rebuilt_buckets) {
    data_.strs_map["rebuilt_bucket_sizes"] = c10::Join(", ", status.bucket_bytes);
    data_.strs_map["rebuilt_per_bucket_param_indices"] = joined_buckets(status.bucket_indices);
  }
  data_.strs_map["prev_iteration_grad_ready_order_indices"] = c10::Join(", ", status.ready_order);
  add_times();
  add_overlap(reducer_->backward_times());
  if (integers.count("backward_comm_exposed_time") > 0) average_of("backward_comm_exposed_time");
  add_tuning();
  c10::LogPyTorchDDPUsage(data_);
}

void LoggingData::add_duration(const std::string& name, std::optional<int64_t> nanoseconds) {
  if (!nanoseconds) return;
  // The clocks of different threads may differ a little.
  const int64_t value = std::max<int64_t>(*nanoseconds, 0);
  data_.ints_map[name] = value;
  average_of(name);
}

void LoggingData::average_of(const std::string& name) {
  auto& integers = data_.ints_map;
  int64_t& average = integers["avg_" + name];
  average = ((average * (samples_ - 1)) + integers[name]) / samples_;
}

void LoggingData::add_times() {
  StepTimer& timer = reducer_->timer();
  add_duration("forward_compute_time", timer.between(Event::kForwardStart, Event::kBackwardComputeStart));
  add_duration("backward_compute_time", timer.between(Event::kBackwardComputeStart, Event::kBackwardComputeEnd));
  add_duration("backward_comm_time", timer.between(Event::kBackwardCommStart, Event::kBackwardCommEnd));
  add_duration("backward_compute_comm_overlap_time",
               timer.between(Event::kBackwardCommStart, Event::kBackwardComputeEnd));
  const auto stamp = [&](const char* name, Event event) {
    if (const auto time = timer.timestamp(event)) data_.ints_map[name] = *time;
  };
  stamp("forward_compute_time_start", Event::kForwardStart);
  stamp("backward_compute_time_start", Event::kBackwardComputeStart);
  stamp("backward_compute_time_end", Event::kBackwardComputeEnd);
  stamp("backward_comm_time_start", Event::kBackwardCommStart);
  stamp("backward_comm_time_end", Event::kBackwardCommEnd);
}

void LoggingData::add_tuning() {
  const BucketTuning tuning = reducer_->tuning();
  if (!tuning.enabled) return;
  auto& integers = data_.ints_map;
  integers["bucket_cap_auto"] = 1;
  integers["comm_latency_time"] = std::llround(tuning.cost.latency_ns);
  // Zero if the reductions that were measured took no longer for more bytes.
  integers["comm_bytes_per_second"] = tuning.cost.ns_per_byte > 0 ? std::llround(1e9 / tuning.cost.ns_per_byte) : 0;
  integers["comm_slowdown_percent"] = std::llround(100 * tuning.cost.slowdown);
  if (tuning.settled()) integers["bucket_cap_bytes"] = tuning.caps.others;
}

void LoggingData::add_overlap(const BackwardTimes& times) {
  if (times.iteration == 0) return;
  const std::vector<int64_t> exposed = exposed_times(times);
  std::vector<int64_t> durations;
  for (const BucketTimes& bucket : times.buckets) durations.push_back(bucket.reduction_ended - bucket.reduction_began);
  data_.ints_map["backward_comm_exposed_time"] = std::accumulate(exposed.begin(), exposed.end(), int64_t{0});
  data_.ints_map["backward_comm_busy_time"] = busy_time(times);
  data_.strs_map["bucket_comm_times"] = c10::Join(", ", durations);
  data_.strs_map["bucket_comm_exposed_times"] = c10::Join(", ", exposed);
}

void LoggingData::log_error(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  data_.ints_map["has_error"] = 1;
  data_.strs_map["error"] = error;
  data_.ints_map["iteration"] = reducer_->iterations();
  c10::LogPyTorchDDPUsage(data_);
}

void LoggingData::add_error_of_reducer() {
  const ReducerStatus status = reducer_->status();
  if (status.error.empty()) return;
  data_.ints_map["has_error"] = 1;
  data_.strs_map["error"] = status.error;
  data_.ints_map["iteration"] = status.iterations;
}

void LoggingData::set_comm_hook(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  data_.strs_map["comm_hook"] = name;
}

void LoggingData::set_static_graph() {
  const std::lock_guard<std::mutex> lock(mutex_);
  data_.ints_map["static_graph"] = 1;
}

void LoggingData::set_uneven_input_join() {
  const std::lock_guard<std::mutex> lock(mutex_);
  data_.ints_map["join_uneven_inputs"] = 1;
}

c10::DDPLoggingData LoggingData::snapshot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  add_error_of_reducer();
  add_overlap(reducer_->backward_times());
  add_tuning();
  if (reducer_->options().find_unused_parameters) {
    data_.ints_map["can_set_static_graph"] = reducer_->graph_is_static() ? 1 : 0;
  }
  return data_;
}

}  // namespace ours
