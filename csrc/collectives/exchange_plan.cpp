#include "collectives/exchange_plan.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace ours {

void check_root(int root, int size) {
  if (root >= 0 && root < size) return;
  throw InvalidArgument("root is " + std::to_string(root) + " in a group of " + std::to_string(size) +
                        " ranks; give a rank of the group, 0 to " + std::to_string(size - 1));
}

bool ExchangePlan::is_common() const {
  switch (movement) {
    case Movement::Scatter:
    case Movement::AllToAll:
      return false;
    case Movement::Broadcast:
    case Movement::AllGather:
    case Movement::Gather:
      break;
  }
  return true;
}

void ExchangePlan::write_sizes(uint64_t* table) const {
  for (size_t r = 0; r < sends.size(); ++r) {
    table[r] = sent(r);
    table[sends.size() + r] = received(r);
  }
}

namespace {

/// The finalizer of MurmurHash3: every bit of the number changes about half of the result's.
uint64_t mix(uint64_t n) {
  n = (n ^ n >> 33) * 0xff51afd7ed558ccd;
  n = (n ^ n >> 33) * 0xc4ceb9fe1a85ec53;
  return n ^ n >> 33;
}

uint64_t number_of_message(size_t from, size_t to, size_t bytes) {
  return bytes == 0 ? 0 : mix(mix(uint64_t{from} << 32 | to) + bytes);
}

bool intersect(const std::optional<ConstSpan>& send, const std::optional<Span>& receive) {
  if (!send || !receive) return false;
  const auto from = reinterpret_cast<uintptr_t>(send->data);
  const auto to = reinterpret_cast<uintptr_t>(receive->data);
  return from < to + receive->bytes && to < from + send->bytes;
}

}  // namespace

uint64_t ExchangePlan::balance(size_t self) const {
  uint64_t balance = 0;
  for (size_t r = 0; r < sends.size(); ++r) {
    if (r == self) continue;
    balance += number_of_message(self, r, sent(r));
    balance -= number_of_message(r, self, received(r));
  }
  return balance;
}

size_t ExchangePlan::longest(size_t self) const {
  size_t longest = 0;
  for (size_t r = 0; r < sends.size(); ++r) {
    if (r != self) longest = std::max({longest, sent(r), received(r)});
  }
  return longest;
}

bool ExchangePlan::overlaps(size_t peer) const { return intersect(sends[peer], receives[peer]); }

bool ExchangePlan::overwrites_sends(size_t self) const {
  const bool common = is_common();
  for (size_t from = 0; from < receives.size(); ++from) {
    // What it sends to itself is not written if it is there already.
    const bool stays = from == self && receives[from] && sends[from] && receives[from]->data == sends[from]->data;
    if (stays) continue;
    for (size_t to = 0; to < sends.size(); ++to) {
      if ((from == self && to == self) || !sends[to]) continue;
      if (intersect(sends[to], receives[from])) return true;
      if (common) break;
    }
  }
  return false;
}

bool ExchangePlan::is_uniform(size_t bytes) const {
  const auto fits = [bytes](const auto& span) { return span && span->bytes == bytes; };
  return std::all_of(sends.begin(), sends.end(), fits) && std::all_of(receives.begin(), receives.end(), fits);
}

void ExchangePlan::copy_own(size_t self) const {
  const auto& from = sends[self];
  const auto& to = receives[self];
  if (from && to && from->bytes != 0 && from->data != to->data) std::memmove(to->data, from->data, from->bytes);
}

ExchangePlan Planner::empty(Movement movement, int root) const {
  const auto ranks = static_cast<size_t>(size);
  ExchangePlan plan{movement, root, {}, {}};
  plan.sends.resize(ranks);
  plan.receives.resize(ranks);
  return plan;
}

void Planner::check_one_a_rank(size_t buffers) const {
  if (buffers == static_cast<size_t>(size)) return;
  throw InvalidArgument(std::string(name_of(op)) + " got " + std::to_string(buffers) + " buffers in a group of " +
                        std::to_string(size) + " ranks; give one a rank");
}

ExchangePlan Planner::checked(ExchangePlan plan) const {
  const auto me = static_cast<size_t>(rank);
  if (!plan.sends[me] || !plan.receives[me] || plan.sent(me) == plan.received(me)) return plan;
  throw InvalidArgument(std::string(name_of(op)) + " on rank " + std::to_string(rank) + " gives itself " +
                        std::to_string(plan.sent(me)) + " bytes but expects " + std::to_string(plan.received(me)) +
                        "; make the sizes equal");
}

ExchangePlan Planner::broadcast(Span buffer, int root) const {
  check_root(root, size);
  ExchangePlan plan = empty(Movement::Broadcast, root);
  if (rank == root) plan.sends.assign(plan.sends.size(), ConstSpan{buffer.data, buffer.bytes});
  plan.receives[static_cast<size_t>(root)] = buffer;
  return plan;
}

ExchangePlan Planner::all_gather(ConstSpan input, const std::vector<Span>& outputs) const {
  check_one_a_rank(outputs.size());
  ExchangePlan plan{Movement::AllGather, -1, {}, {}};
  plan.sends.assign(outputs.size(), input);
  plan.receives.assign(outputs.begin(), outputs.end());
  return checked(std::move(plan));
}

ExchangePlan Planner::gather(ConstSpan input, const std::vector<Span>& outputs, int root) const {
  check_root(root, size);
  ExchangePlan plan = empty(Movement::Gather, root);
  plan.sends[static_cast<size_t>(root)] = input;
  if (rank != root) return plan;
  check_one_a_rank(outputs.size());
  plan.receives.assign(outputs.begin(), outputs.end());
  return checked(std::move(plan));
}

ExchangePlan Planner::scatter(const std::vector<ConstSpan>& inputs, Span output, int root) const {
  check_root(root, size);
  ExchangePlan plan = empty(Movement::Scatter, root);
  plan.receives[static_cast<size_t>(root)] = output;
  if (rank != root) return plan;
  check_one_a_rank(inputs.size());
  plan.sends.assign(inputs.begin(), inputs.end());
  return checked(std::move(plan));
}

ExchangePlan Planner::all_to_all(const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) const {
  check_one_a_rank(inputs.size());
  check_one_a_rank(outputs.size());
  ExchangePlan plan{Movement::AllToAll, -1, {}, {}};
  plan.sends.assign(inputs.begin(), inputs.end());
  plan.receives.assign(outputs.begin(), outputs.end());
  return checked(std::move(plan));
}

std::string sizes_disagree(const std::string& sender, uint64_t sent, const std::string& receiver, uint64_t expected,
                           const CallRecord& record) {
  return sender + " sends " + std::to_string(sent) + " bytes to " + receiver + ", which expects " +
         std::to_string(expected) + ", in " + describe_record(record) +
         ". Make the sizes of the tensors agree on all ranks";
}

size_t check_sizes(const std::vector<const uint64_t*>& tables, const std::function<std::string(int rank)>& describe,
                   const CallRecord& record) {
  const size_t ranks = tables.size();
  size_t most = 0;
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      if (from == to) continue;
      const uint64_t sent = tables[from][to];
      const uint64_t expected = tables[to][ranks + from];
      if (sent != expected) {
        throw MismatchError(
            sizes_disagree(describe(static_cast<int>(from)), sent, describe(static_cast<int>(to)), expected, record));
      }
      most = std::max<size_t>(most, sent);
    }
  }
  return most;
}

}  // namespace ours
