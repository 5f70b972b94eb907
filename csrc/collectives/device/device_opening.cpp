#include "collectives/device/device_opening.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace ours {

namespace {

/// The number of words that a CallRecord and a fingerprint take in a message.
constexpr size_t kRecordWords = sizeof(CallRecord) / sizeof(uint64_t) + 1;

Words pack(const CallRecord& record, uint64_t fingerprint) {
  Words words(kRecordWords, fingerprint);
  std::memcpy(words.data(), &record, sizeof(record));
  return words;
}

CallRecord unpack(const Words& words) {
  CallRecord record{};
  std::memcpy(&record, words.data(), sizeof(record));
  return record;
}

bool same_call(const Words& a, const Words& b) {
  return same_record(unpack(a), unpack(b)) && a[kRecordWords - 1] == b[kRecordWords - 1];
}

[[noreturn]] void throw_mismatch(const std::vector<Words>& opened) {
  const auto words = [&](int r) -> const Words& { return opened[static_cast<size_t>(r)]; };
  throw MismatchError(different_calls(calls_of_ranks(
                          static_cast<int>(opened.size()), [&](int r) { return unpack(words(r)); },
                          [&](int a, int b) { return same_call(words(a), words(b)); }, rank_name)) +
                      ", with lists of tensors of the same sizes");
}

/// Returns all ranks' words, by rank: counts[r] words of rank r. `mine` are this rank's.
std::vector<Words> gather_words(Group& host, const Call& call, const Words& mine, const std::vector<size_t>& counts) {
  // An extra byte makes the length differ from that of what a peer gathers under the same name by mistake, from its
  // CPU, unless its elements are bytes.
  constexpr size_t kMark = 1;
  std::vector<Words> all;
  std::vector<Span> outputs;
  for (const size_t count : counts) {
    Words& words = all.emplace_back(count + 1);
    outputs.push_back({words.data(), count * sizeof(uint64_t) + kMark});
  }
  const auto me = static_cast<size_t>(host.rank());
  std::copy(mine.begin(), mine.end(), all[me].begin());
  host.all_gather(call, ConstSpan{outputs[me].data, outputs[me].bytes}, outputs);
  for (Words& words : all) words.pop_back();
  return all;
}

}  // namespace

std::vector<std::string> gather_texts(Group& host, const Call& call, const std::string& mine) {
  const auto ranks = static_cast<size_t>(host.size());
  const auto lengths = gather_words(host, call, {mine.size()}, std::vector<size_t>(ranks, 1));
  std::vector<size_t> counts;
  counts.reserve(ranks);
  for (const Words& length : lengths) counts.push_back((length[0] + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  Words padded(counts[static_cast<size_t>(host.rank())]);
  if (!mine.empty()) std::memcpy(padded.data(), mine.data(), mine.size());
  std::vector<std::string> texts;
  texts.reserve(ranks);
  for (const Words& words : gather_words(host, call, padded, counts)) {
    texts.emplace_back(reinterpret_cast<const char*>(words.data()), lengths[texts.size()][0]);
  }
  return texts;
}

std::vector<Words> open_call(Group& host, const Running& run, const Words& mine) {
  Words words = pack(run.record, run.fingerprint);
  words.insert(words.end(), mine.begin(), mine.end());
  const std::vector<size_t> counts(static_cast<size_t>(host.size()), words.size());
  std::vector<Words> opened = gather_words(host, run.call, words, counts);
  const bool agree = std::all_of(opened.begin(), opened.end(), [&](const Words& w) { return same_call(w, words); });
  if (!agree) throw_mismatch(opened);
  for (Words& w : opened) w.erase(w.begin(), w.begin() + kRecordWords);
  return opened;
}

Words table_of(const ExchangePlan& plan) {
  Words table(2 * plan.sends.size());
  plan.write_sizes(table.data());
  return table;
}

size_t check_tables(const std::vector<Words>& opened, const CallRecord& record) {
  std::vector<const uint64_t*> tables;
  tables.reserve(opened.size());
  for (const Words& table : opened) tables.push_back(table.data());
  return check_sizes(tables, rank_name, record);
}

}  // namespace ours
