#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Every environment variable that the library reads. To add one: a field here, a row in options.cpp.

namespace ours {

enum class Setting { Auto, Off, On };

/// As what float32 values travel between nodes.
enum class WireType : uint8_t { Float32, BFloat16, Float16 };

/// What moves the data of device tensors.
enum class DeviceEngine : uint8_t { Auto, Nccl, Ipc, Staging };

/// When ranks compare what they call of what NCCL does.
enum class CheckTime : uint8_t { After, Before };

/// Its word in OURS_DEVICE_ENGINE, e.g. "ipc".
const char* name_of(DeviceEngine engine);

/// Ports from first to last; 0 to 0: any that the system gives.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

/// The values in force; the initialisers are the defaults. What each means stands in its row (see option_rows()).
struct Options {
  int64_t yield_us = 500;
  Setting spin = Setting::Auto;
  int64_t chunk_bytes = 0;  // 0: chosen automatically
  int64_t small_bytes = 0;  // 0: chosen automatically
  std::vector<int> comm_thread_affinity;
  int64_t comm_nice = 0;
  bool inline_calls = true;
  bool blocking_wait = false;
  CheckTime check = CheckTime::After;
  bool spread = true;
  bool huge_pages = true;
  bool reduce_in_place = true;
  Setting write_around = Setting::Auto;
  std::string node_id;
  std::string interface;
  std::string internode = "tcp";
  PortRange port_range;
  int64_t tcp_streams = 0;     // 0: chosen automatically
  std::string tcp_congestion;  // empty: the system's
  WireType wire_type = WireType::Float32;
  std::string select;
  DeviceEngine device_engine = DeviceEngine::Auto;
};

/// One environment variable: how it is called, written, parsed and explained.
struct OptionRow {
  const char* name;
  const char* accepted;
  const char* help;
  /// Stores `text` into its field; false if it is not what `accepted` says.
  bool (*parse)(const std::string& text, Options& options);
  /// The field's value, as it would be written in the environment.
  std::string (*show)(const Options& options);
};

const std::vector<OptionRow>& option_rows();

/// Builds the options from `lookup`, which returns a variable's value or nullptr.
/// Throws InvalidArgument naming the variable, its value and what is accepted.
Options parse_options(const std::function<const char*(const char*)>& lookup);

/// A sentence for each of `names` that begins with OURS_ and that nothing reads, with the name that may have been
/// meant.
std::vector<std::string> stray_variables(const std::vector<std::string>& names);

/// The names of all variables in this process's environment.
std::vector<std::string> environment_names();

/// The options of this process, read from its environment on the first call. Throws as parse_options().
const Options& options();

/// What a launcher of MPI jobs left in this process's environment under `name`; empty: nothing.
std::string launcher_variable(const char* name);

}  // namespace ours
