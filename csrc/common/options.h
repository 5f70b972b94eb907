#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Every environment variable that the library reads. To add one, add a field here and a row in options.cpp.

namespace ours {

enum class Setting { Auto, Off, On };

/// The type in which float32 values travel between nodes.
enum class WireType : uint8_t { Float32, BFloat16, Float16 };

enum class DeviceEngine : uint8_t { Auto, Nccl, Ipc, Staging };

/// When ranks compare what they call of what NCCL does.
enum class CheckTime : uint8_t { After, Before };

/// Its word in OURS_DEVICE_ENGINE, e.g. "ipc".
const char* name_of(DeviceEngine engine);

/// The ports from `first` to `last`. Two zeros mean any port that the system gives.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

/// The values in force. The initialisers are the defaults; option_rows() says what each one means.
struct Options {
  int64_t yield_us = 500;
  Setting spin = Setting::Auto;
  int64_t chunk_bytes = 0;  // 0: chosen automatically
  int64_t domains = 0;      // 0: chosen automatically
  std::vector<int> comm_thread_affinity;
  int64_t comm_nice = 0;
  bool inline_calls = true;
  bool direct = true;
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
  int64_t tcp_streams = 0;       // 0: chosen automatically
  int64_t idle_connections = 0;  // 0: chosen automatically
  std::string tcp_congestion;    // empty: the system's
  WireType wire_type = WireType::Float32;
  std::string select;
  std::string timeline;
  DeviceEngine device_engine = DeviceEngine::Auto;
};

/// An environment variable: its name, what it accepts and means, and how to parse and print it.
struct OptionRow {
  const char* name;
  std::string accepted;
  const char* help;
  /// Stores `text` into its field. Returns false if the text is not what `accepted` says.
  std::function<bool(const std::string& text, Options& options)> parse;
  /// The field's value, as it would be written in the environment.
  std::function<std::string(const Options& options)> show;
};

const std::vector<OptionRow>& option_rows();

/// Builds the options from `lookup`, which returns a variable's value or nullptr. Throws InvalidArgument, which names
/// the variable, its value and what is accepted.
Options parse_options(const std::function<const char*(const char*)>& lookup);

/// For each of `names` that begins with OURS_ and that nothing reads, a sentence that suggests the name that may have
/// been meant.
std::vector<std::string> stray_variables(const std::vector<std::string>& names);

std::vector<std::string> environment_names();

/// The options of this process, read from its environment at the first call. Throws like parse_options().
const Options& options();

/// The variable `name` that a launcher of MPI jobs may have set; empty if it is not set.
std::string launcher_variable(const char* name);

}  // namespace ours
