#include "common/options.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>

#include "common/error.h"

namespace ours {
namespace {

/// The whole of `text` as a number from `low` to `high`, or nothing.
std::optional<int64_t> parse_integer(const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || value < low || value > high) return std::nullopt;
  return value;
}

/// The most shared memory that a rank may be told to take; a larger number is probably a typing error.
constexpr int64_t kMaxBytes = int64_t{1} << 30;
constexpr int kMaxCpu = 1 << 16;
constexpr size_t kMaxCpus = kMaxCpu + 1;

/// A number of bytes with an optional suffix K, M or G (powers of 1024), or nothing.
std::optional<int64_t> parse_bytes(std::string text) {
  static constexpr std::array<char, 3> kSuffixes = {'K', 'M', 'G'};
  int shift = 0;
  if (!text.empty()) {
    const auto* suffix = std::find(kSuffixes.begin(), kSuffixes.end(), text.back());
    if (suffix != kSuffixes.end()) {
      shift = 10 * (static_cast<int>(suffix - kSuffixes.begin()) + 1);
      text.pop_back();
    }
  }
  const auto value = parse_integer(text, 0, kMaxBytes >> shift);
  if (!value) return std::nullopt;
  return *value << shift;
}

/// CPU numbers such as "0-3,8", or nothing. An empty text is an empty list.
std::optional<std::vector<int>> parse_cpus(const std::string& text) {
  std::vector<int> cpus;
  for (size_t begin = 0; begin < text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, comma - begin);
    const size_t dash = std::min(item.find('-'), item.size());
    const auto first = parse_integer(item.substr(0, dash), 0, kMaxCpu);
    const auto last = dash == item.size() ? first : parse_integer(item.substr(dash + 1), 0, kMaxCpu);
    // A comma at the end would leave a number out, so it is refused like an empty item.
    if (!first || !last || *first > *last || comma + 1 == text.size()) return std::nullopt;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    // Some are given many times.
    if (cpus.size() > kMaxCpus) return std::nullopt;
    begin = comma + 1;
  }
  return cpus;
}

/// Variables with these prefixes are read when the package is built, or by its tests and benchmarks.
constexpr const char* kOfOthers[] = {"OURS_WITH_", "OURS_WERROR", "OURS_TEST_", "OURS_BENCHMARK_"};

/// The edit distance of two texts (Levenshtein).
size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

/// Two ports such as "20000-20999", or nothing. An empty text is any port.
std::optional<PortRange> parse_ports(const std::string& text) {
  if (text.empty()) return PortRange{};
  const size_t dash = std::min(text.find('-'), text.size());
  const auto first = parse_integer(text.substr(0, dash), 1, UINT16_MAX);
  if (!first || dash == text.size()) return std::nullopt;
  const auto last = parse_integer(text.substr(dash + 1), *first, UINT16_MAX);
  if (!last) return std::nullopt;
  return PortRange{static_cast<uint16_t>(*first), static_cast<uint16_t>(*last)};
}

std::string show_ports(const PortRange& range) {
  return range.first == 0 ? "" : std::to_string(range.first) + '-' + std::to_string(range.last);
}

/// A name of letters, digits, `_` and `-`, in small letters, or nothing.
std::optional<std::string> parse_name(const std::string& text) {
  const auto fits = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-'; };
  if (text.empty() || !std::all_of(text.begin(), text.end(), fits)) return std::nullopt;
  std::string name;
  for (const unsigned char c : text) name += static_cast<char>(std::tolower(c));
  return name;
}

// A row for each kind of field. `parse` returns nothing for a text that is not accepted.

template <class Value, class Parse, class Show>
OptionRow row(const char* name, Value Options::* field, std::string accepted, const char* help, Parse parse,
              Show show) {
  return {name, std::move(accepted), help,
          [=](const std::string& text, Options& options) {
            std::optional<Value> value = parse(text);
            if (value) options.*field = std::move(*value);
            return value.has_value();
          },
          [=](const Options& options) { return show(options.*field); }};
}

std::string show_number(int64_t number) { return std::to_string(number); }

OptionRow integer_row(const char* name, int64_t Options::* field, int64_t low, int64_t high, const char* accepted,
                      const char* help) {
  const auto parse = [=](const std::string& text) { return parse_integer(text, low, high); };
  return row(name, field, accepted, help, parse, show_number);
}

OptionRow bytes_row(const char* name, int64_t Options::* field, const char* help) {
  return row(name, field, "bytes up to 1G (suffix K, M or G allowed), 0 = automatic", help, parse_bytes, show_number);
}

std::string same(const std::string& text) { return text; }

OptionRow text_row(const char* name, std::string Options::* field, const char* accepted, const char* help) {
  return row(name, field, accepted, help, same, same);
}

// The words for the values of an enumeration, or of a bool, in order.
constexpr std::array kSwitch = {"0", "1"};
constexpr std::array kSettings = {"auto", "0", "1"};
constexpr std::array kCheckTimes = {"after", "before"};
constexpr std::array kWireTypes = {"float32", "bfloat16", "float16"};
constexpr std::array kEngines = {"auto", "nccl", "ipc", "staging"};

template <class Enum, size_t N>
OptionRow word_row(const char* name, Enum Options::* field, const std::array<const char*, N>& words, const char* help) {
  std::string accepted = words[0];
  for (size_t i = 1; i < N; ++i) accepted += (i + 1 < N ? ", " : " or ") + std::string(words[i]);
  const auto parse = [words](const std::string& text) -> std::optional<Enum> {
    const auto found = std::find(words.begin(), words.end(), text);
    if (found == words.end()) return std::nullopt;
    return static_cast<Enum>(found - words.begin());
  };
  const auto show = [words](Enum value) { return std::string(words[static_cast<size_t>(value)]); };
  return row(name, field, accepted, help, parse, show);
}

}  // namespace

const char* name_of(DeviceEngine engine) { return kEngines[static_cast<size_t>(engine)]; }

const std::vector<OptionRow>& option_rows() {
  static const std::vector<OptionRow> kRows = {
      integer_row("OURS_YIELD_US", &Options::yield_us, 0, 1'000'000, "0 to 1000000",
                  "Microseconds for which a waiting rank keeps yielding its core before it sleeps. It sleeps at once "
                  "where something else computes on that core."),
      word_row("OURS_SPIN", &Options::spin, kSettings,
               "Whether a waiting rank spins instead of yielding its core. auto: for its first 2 us, and only where "
               "every rank of the node has a core of its own."),
      bytes_row(
          "OURS_CHUNK_BYTES", &Options::chunk_bytes,
          "Bytes of its tensor that a rank puts into shared memory at a time. Automatic: 512K. The node's first rank "
          "decides."),
      integer_row(
          "OURS_DOMAINS", &Options::domains, 0, 64, "0 to 64, 0 = automatic",
          "Into how many domains the ranks of a node are divided, in their order and as equally as possible. In long "
          "all_reduces and reduces within one node, only one sum and the result go from domain to domain. Automatic: a "
          "domain for each socket, if each rank is bound to one and each has at least 4 ranks; otherwise 1. The node's "
          "first rank decides."),
      row("OURS_COMM_THREAD_AFFINITY", &Options::comm_thread_affinity, "CPU numbers and ranges such as 0-3,8, or empty",
          "CPUs on which the communication threads may run; empty: wherever the rank may.", parse_cpus, join),
      integer_row(
          "OURS_COMM_NICE", &Options::comm_nice, -20, 19, "-20 to 19",
          "Added to the niceness of the thread that starts the communication threads. A positive value leaves the "
          "cores to computing threads; a negative one takes them first, for which the process needs permission."),
      text_row(
          "OURS_TIMELINE", &Options::timeline, "a path, or empty",
          "Records a timeline of all ranks for Perfetto into this file, from the first group that has all ranks to the "
          "end of the process. Empty: none. See docs/timeline.md."),
      word_row("OURS_INLINE", &Options::inline_calls, kSwitch,
               "Whether synchronous calls run on the caller's own thread when nothing is queued."),
      word_row("OURS_DIRECT", &Options::direct, kSwitch,
               "Whether ranks of a node read long messages, and large arrays that they reduce, where they lie in the "
               "memory of other ranks, if the system allows it. With 0 they are copied through shared memory. The "
               "node's first rank decides."),
      word_row("OURS_BLOCKING_WAIT", &Options::blocking_wait, kSwitch,
               "Whether waiting for a collective that NCCL does makes the host wait until it has ended, and throws its "
               "error there. With 0 only the current stream waits."),
      word_row("OURS_CHECK", &Options::check, kCheckTimes,
               "When ranks compare their calls of collectives that NCCL does. after: in the background. before: before "
               "the call, while the host waits, which shows where a program goes wrong."),
      word_row("OURS_SPREAD", &Options::spread, kSwitch,
               "Whether ranks that share a core move apart at the start of a collective, or while they "
               "wait for messages."),
      word_row("OURS_HUGE_PAGES", &Options::huge_pages, kSwitch,
               "Whether memory for gradients, and tensors of 4 MiB and more that are used repeatedly, are moved onto "
               "huge pages where the system has them."),
      word_row("OURS_REDUCE_IN_PLACE", &Options::reduce_in_place, kSwitch,
               "Whether DistributedDataParallel averages large gradients in their own memory while backward goes on. "
               "With 0 they change only when backward ends."),
      word_row("OURS_WRITE_AROUND", &Options::write_around, kSettings,
               "Whether a rank bypasses its cache when it writes what its peers read next. auto measures both; "
               "bypassing is faster where the ranks' cores have different last-level caches."),
      text_row("OURS_NODE_ID", &Options::node_id, "any text, or empty",
               "Ranks with different texts count as being on different nodes, even if they could share memory. Ranks "
               "with the same text still have to prove that they do."),
      text_row("OURS_INTERFACE", &Options::interface, "interfaces, networks, addresses, or empty",
               "The addresses at which ranks on other nodes reach this one: interfaces (eth0), networks (10.0.0.0/8) "
               "or addresses, separated by commas. If several are named, they share the data of collectives, so they "
               "should be equally fast and on networks of their own. ^ before the list means all others, which share "
               "nothing. Empty: the interface that the route to the master starts from."),
      row("OURS_INTERNODE", &Options::internode, "tcp, mpi, or the name of a backend of torch.distributed such as gloo",
          "What moves the data of collectives between nodes. Small messages and agreements always go over TCP. It must "
          "be the same on all ranks.",
          parse_name, same),
      row("OURS_PORT_RANGE", &Options::port_range, "two ports such as 20000-20999, or empty",
          "Ports on which ranks wait for ranks of other nodes: one of TCP and one of UDP for each process and address; "
          "beyond 200 groups, another one of TCP for each 200. Empty: any free port.",
          parse_ports, show_ports),
      integer_row(
          "OURS_TCP_STREAMS", &Options::tcp_streams, 0, 16, "0 to 16, 0 = automatic",
          "TCP connections that share the bytes of collectives between two ranks of different nodes. Automatic: "
          "one for each name in OURS_INTERFACE, 1 if it is empty or begins with ^. Rank 0's value holds for its "
          "group."),
      integer_row(
          "OURS_IDLE_CONNECTIONS", &Options::idle_connections, 0, 1'000'000, "0 to 1000000, 0 = automatic",
          "Connections to ranks of other nodes that the groups of a process keep while nobody uses them. Beyond "
          "that, those of the groups that were not used for longest are closed, and made again when they are "
          "needed. Automatic: a quarter of the files that the process may open, 4096 at most."),
      text_row("OURS_TCP_CONGESTION", &Options::tcp_congestion, "a name such as cubic or dctcp, or empty",
               "Congestion control for what this rank sends to other nodes: one of those that `sysctl "
               "net.ipv4.tcp_allowed_congestion_control` lists. Empty: the system's. If that is `bbr`, connections "
               "whose round trip takes a millisecond or less get `cubic` or `reno`, because `bbr` is slow there."),
      word_row("OURS_WIRE_DTYPE", &Options::wire_type, kWireTypes,
               "The type in which the float32 sums of long all_reduces and reduces travel between nodes. The half "
               "types halve the bytes and round each node's sum and the result once; sums are still computed in "
               "float32. Rank 0's value holds for its group."),
      text_row("OURS_SELECT", &Options::select, "rules, the path of a file of them, or empty",
               "Which algorithms are used within and between nodes: rules such as `all_reduce nodes>=8 bytes<=64K "
               "doubling`, separated by semicolons, or the path (with a slash) of a file of such lines, which `python "
               "-m ourddp tune` writes. They come before the built-in rules; `python -m ourddp select` prints all of "
               "them. Rank 0's rules hold for its group."),
      word_row("OURS_DEVICE_ENGINE", &Options::device_engine, kEngines,
               "What moves the data of CUDA tensors: NCCL (nccl), the devices' memory mapped by all ranks of one node "
               "(ipc), or the memory of the hosts (staging). auto: nccl where each rank has a device of its own, "
               "otherwise ipc where all ranks are on one node, otherwise staging. It must be the same on all ranks."),
  };
  return kRows;
}

Options parse_options(const std::function<const char*(const char*)>& lookup) {
  Options options;
  for (const OptionRow& row : option_rows()) {
    const char* text = lookup(row.name);
    if (text != nullptr && !row.parse(text, options)) {
      throw InvalidArgument(std::string(row.name) + "='" + text + "' is not understood; accepted: " + row.accepted +
                            ". Correct the variable or unset it (default: '" + row.show(Options()) + "').");
    }
  }
  return options;
}

std::vector<std::string> stray_variables(const std::vector<std::string>& names) {
  std::vector<std::string> known;
  for (const OptionRow& row : option_rows()) known.emplace_back(row.name);
  std::vector<std::string> complaints;
  for (const std::string& name : names) {
    const auto begins = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
    if (!begins("OURS_") || std::any_of(std::begin(kOfOthers), std::end(kOfOthers), begins)) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    std::map<size_t, std::string> by_edits;
    for (const std::string& other : known) by_edits.emplace(edits_between(name, other), other);
    complaints.push_back(name + " is set, but nothing reads it. Did you mean " + by_edits.begin()->second +
                         "? `python -m ourddp options` lists all");
  }
  return complaints;
}

std::vector<std::string> environment_names() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    names.push_back(text.substr(0, text.find('=')));
  }
  return names;
}

const Options& options() {
  // getenv is unsafe only against a concurrent setenv, which a reader cannot prevent.
  static const Options kOptions =
      parse_options([](const char* name) { return std::getenv(name); });  // NOLINT(concurrency-mt-unsafe)
  return kOptions;
}

std::string launcher_variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): as above
  return value == nullptr ? "" : value;
}

}  // namespace ours
