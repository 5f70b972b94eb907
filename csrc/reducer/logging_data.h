#pragma once

#include <c10/util/Logging.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reducer/reducer.h"

namespace ours {

/// The facts about a wrapped module when it is built.
struct ConstructionFacts {
  std::string module_name;
  std::vector<int> device_ids;
  int output_device = -1;
  bool broadcast_buffers = true;
  bool has_sync_bn = false;
  bool static_graph = false;
  /// Further values to log as they are, such as environment variables.
  std::map<std::string, std::string> texts;
  std::map<std::string, int64_t> numbers;
};

/// Collects the figures that PyTorch's DDP logs, under the same keys; times are in nanoseconds.
class LoggingData {
 public:
  explicit LoggingData(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}

  void log_construction(const ConstructionFacts& facts);
  /// To be called before each forward: records the times of the last step, if that one was sampled.
  void log_step();
  void log_error(const std::string& error);
  void set_comm_hook(const std::string& name);
  void set_static_graph();
  void set_uneven_input_join();

  c10::DDPLoggingData snapshot();

 private:
  void add_construction_sizes();
  void add_times();
  void add_tuning();
  void add_overlap(const BackwardTimes& times);
  void add_duration(const std::string& name, std::optional<int64_t> nanoseconds);
  /// Updates the average of `name` over all sampled steps with this step's value.
  void average_of(const std::string& name);
  void add_error_of_reducer();

  std::mutex mutex_;
  std::shared_ptr<Reducer> reducer_;
  c10::DDPLoggingData data_;
  int64_t samples_ = 0;
};

}  // namespace ours
