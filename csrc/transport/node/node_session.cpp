#include "transport/node/node_session.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>

#include "common/descriptors.h"
#include "common/listed.h"
#include "common/machine_share.h"
#include "common/options.h"
#include "common/own_name.h"
#include "common/process_memory.h"
#include "common/random.h"
#include "transport/topology.h"

namespace ours {

namespace {

constexpr const char* kDied = "died";

WaitPolicy wait_policy_for(bool have_own_cores) {
  // The scheduler now and then puts even ranks that could have a core each on the same one. So every rank yields
  // after a moment of spinning, which saves the system call if the answer is near.
  constexpr std::chrono::microseconds kBriefly{2};
  WaitPolicy policy;
  policy.awake = std::chrono::microseconds(options().yield_us);
  if (options().spin == Setting::On) policy.spin = policy.awake;
  if (options().spin == Setting::Auto && have_own_cores) policy.spin = kBriefly;
  return policy;
}

std::shared_ptr<SharedMemory> create_memory(int ranks, size_t bytes) {
  try {
    return SharedMemory::create(bytes);
  } catch (const MemoryRefused&) {
    if (ranks > 1) throw;
    return SharedMemory::create_alone(bytes);  // nobody may open it
  }
}

/// The parts of an address().
struct Address {
  std::string node_id;
  std::string boot;
  pid_t pid = 0;
  int fd = -1;
  uint64_t nonce[2] = {};

  std::string text() const {
    std::ostringstream out;
    out << "ours1 " << boot << ' ' << pid << ' ' << fd << ' ' << nonce[0] << ' ' << nonce[1] << " [" << node_id << ']';
    return out.str();
  }

  static Address parse(const std::string& text) {
    Address address;
    std::istringstream in(text);
    std::string tag, node;
    in >> tag >> address.boot >> address.pid >> address.fd >> address.nonce[0] >> address.nonce[1];
    std::getline(in, node);
    if (!in || tag != "ours1" || node.size() < 3)
      throw Error("malformed address of a peer's shared memory: '" + text +
                  "'; does another program use the same store?");
    address.node_id = node.substr(2, node.size() - 3);
    return address;
  }
};

/// The ranks reserve their parts one by one. Without enough room for all, the system would end some process, and not
/// always one of these.
void check_room(const NodeLayout& layout) {
  const std::optional<MemoryRoom> room = memory_room();
  if (!room || layout.channels() <= room->bytes) return;
  throw Error("the shared memory of " + std::to_string(layout.ranks) + " ranks takes " +
              std::to_string(layout.channels() >> 20) + " MiB with chunks of " + std::to_string(layout.chunk_bytes) +
              " bytes, but there are only " + std::to_string(room->bytes >> 20) + " MiB (" + room->source +
              "). Set OURS_CHUNK_BYTES to less, 128K say, or give the job more memory");
}

NodeLayout layout_of(const SegmentHeader& header) {
  return NodeLayout{header.ranks, header.chunk_bytes, header.ring_bytes};
}

}  // namespace

NodeConfig NodeConfig::from_options(int ranks) {
  constexpr size_t kDefaultChunk = 512 * 1024;
  constexpr size_t kDefaultRing = 256 * 1024;
  const Options& options = ours::options();
  NodeConfig config{};
  // Every rank must get at least a cache line of a chunk.
  const size_t least = static_cast<size_t>(ranks) * 4 * kCacheLine;
  config.chunk_bytes =
      std::max(options.chunk_bytes != 0 ? static_cast<size_t>(options.chunk_bytes) : kDefaultChunk, least);
  config.chunk_bytes = (config.chunk_bytes + 4095) / 4096 * 4096;
  config.ring_bytes = kDefaultRing;
  config.direct = options.direct;
  config.domains = static_cast<size_t>(options.domains);
  return config;
}

std::shared_ptr<NodeSession> NodeSession::create(int rank, int size, const NodeConfig& config,
                                                 std::shared_ptr<ProcessHeaps> heaps) {
  const NodeLayout layout{static_cast<size_t>(size), config.chunk_bytes, config.ring_bytes};
  check_room(layout);
  auto memory = create_memory(size, layout.total());
  memory->reserve(0, layout.stages());
  auto* header = reinterpret_cast<SegmentHeader*>(memory->data());
  header->magic = kSegmentMagic;
  header->version = kSegmentVersion;
  header->ranks = static_cast<uint32_t>(size);
  header->chunk_bytes = config.chunk_bytes;
  header->ring_bytes = config.ring_bytes;
  header->direct = config.direct ? 1 : 0;
  header->domains = config.domains;
  for (uint64_t& part : header->nonce) part = draw_random<uint64_t>();
  return std::make_shared<NodeSession>(rank, size, std::move(memory), std::move(heaps));
}

std::shared_ptr<NodeSession> NodeSession::open(int rank, int size, const std::string& text) {
  const Address address = Address::parse(text);
  if (address.node_id != options().node_id) {
    throw NotSameNode("OURS_NODE_ID is '" + options().node_id + "' here and '" + address.node_id + "' there");
  }
  if (address.boot != machine_id()) throw NotSameNode("the two run under different kernels (boot ids differ)");
  std::shared_ptr<SharedMemory> memory;
  try {
    memory = SharedMemory::open(descriptor_path(address.pid, address.fd));
  } catch (const Error& e) {
    throw NotSameNode(std::string(e.what()) + " (another container, user or process namespace?)");
  }
  const auto* header = reinterpret_cast<const SegmentHeader*>(memory->data());
  const bool ours = memory->bytes() >= sizeof(SegmentHeader) && header->magic == kSegmentMagic &&
                    header->nonce[0] == address.nonce[0] && header->nonce[1] == address.nonce[1];
  if (!ours) throw NotSameNode("the memory found there is not the leader's (another process namespace?)");
  if (header->version != kSegmentVersion)
    throw Error("the leader runs another version of this package; install one version");
  if (header->ranks != static_cast<uint32_t>(size) || memory->bytes() < layout_of(*header).total()) {
    throw Error("the leader's group has " + std::to_string(header->ranks) + " ranks, this one " + std::to_string(size));
  }
  return std::make_shared<NodeSession>(rank, size, std::move(memory));
}

NodeSession::NodeSession(int rank, int size, std::shared_ptr<SharedMemory> memory, std::shared_ptr<ProcessHeaps> heaps)
    : rank_(rank),
      size_(size),
      memory_(std::move(memory)),
      domains_(Domains::equal(size, 1)),
      watches_(static_cast<size_t>(size)) {
  layout_ = layout_of(header());
  wait_policy_ = wait_policy_for(false);
  std::vector<ShownHeap*> heaps_of_ranks(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) heaps_of_ranks[static_cast<size_t>(r)] = &block(r).heap;
  heap_ = std::make_unique<NodeHeap>(rank, std::move(heaps_of_ranks), std::move(heaps));
  std::vector<SleepWord*> words{&opening(0).passed, &opening(1).passed};
  for (int r = 0; r < size; ++r) words.insert(words.end(), {&block(r).doorbell, &block(r).monitor});
  failure_ = std::make_unique<NodeFailure>(header(), std::move(words));
  attach();
}

NodeSession::~NodeSession() { leave(); }

void NodeSession::attach() {
  RankBlock& me = self();
  if (me.state.load() != kAbsent) {
    throw Error("rank " + std::to_string(rank_) + " is taken twice in one group; give each process a rank of its own");
  }
  me.pid = owner_.pid();
  me.start = start_of(me.pid);
  const std::string host = host_name();
  std::memcpy(me.host, host.data(), std::min(host.size(), sizeof(me.host) - 1));
  if (size_ > 1) me.whereabouts = own_whereabouts();
  me.cores = own_share();
  me.socket = socket_of_all(allowed_cores());
  me.core_of_messages.store(-1, std::memory_order_relaxed);
  mark_ = me.mark = draw_random<uint64_t>();
  me.mark_at = reinterpret_cast<uint64_t>(&mark_);
  me.state.store(kAttached, std::memory_order_release);
  signal(header().attached);
}

std::string NodeSession::address() const {
  Address address;
  address.node_id = options().node_id;
  address.boot = machine_id();
  address.pid = owner_.pid();
  address.fd = memory_->fd();
  std::memcpy(address.nonce, header().nonce, sizeof(address.nonce));
  return address.text();
}

void NodeSession::wait_attached(Deadline deadline, const std::function<void()>& poll) {
  const auto all = [&] {
    return header().attached.value.load(std::memory_order_acquire) >= static_cast<uint32_t>(size_);
  };
  Interrupts interrupts;
  const auto look_around = [&] {
    poll();
    failure_->check();
    check_interrupts(interrupts, [] { return std::string("the making of the group"); });
    if (!deadline.passed()) return;
    std::vector<int> absent;
    for (int r = 0; r < size_; ++r) {
      if (block(r).state.load() == kAbsent) absent.push_back(number_of(r));
    }
    throw TimeoutError("not all ranks joined the group within " + std::to_string(deadline.timeout().count()) +
                       " ms; absent: rank " + listed(absent) + ". Were they started, and did they fail?");
  };
  try {
    wait_on(header().attached, wait_policy_, deadline, all, look_around);
  } catch (...) {
    // Ranks that have attached may have begun to use the group.
    failure_->fail(std::current_exception());
    throw;
  }
  memory_->close_file();
  want_descriptors(static_cast<size_t>(size_));
  std::vector<CoreShare> shares;
  for (int r = 0; r < size_; ++r) {
    // Acquire: the peer's pid, host and cores are read below.
    while (block(r).state.load(std::memory_order_acquire) == kAbsent) ::sched_yield();
    const RankBlock& peer = block(r);
    if (peer.pid != owner_.pid()) watches_[static_cast<size_t>(r)] = ProcessWatch(peer.pid, peer.start);
    shares.push_back(peer.cores);
  }
  have_own_cores_ = ours::have_own_cores(shares);
  wait_policy_ = wait_policy_for(have_own_cores_);
  domains_ = find_domains();
  self().reads_all.store(header().direct != 0 && finds_all_marks(), std::memory_order_release);
}

Domains NodeSession::find_domains() const {
  if (header().domains != 0) return Domains::equal(size_, static_cast<int>(header().domains));
  // With r ranks on each socket, 1/r of the data goes from socket to socket, but there are more synchronisations. The
  // limit was not measured.
  constexpr int kLeastRanks = 4;
  std::vector<int> sockets(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) sockets[static_cast<size_t>(r)] = block(r).socket;
  return Domains(sockets, kLeastRanks);
}

bool NodeSession::all_read() const {
  for (int r = 0; r < size_; ++r) {
    if (!reads_all(r)) return false;
  }
  return true;
}

bool NodeSession::finds_all_marks() const {
  for (int r = 0; r < size_; ++r) {
    uint64_t found = 0;
    const RankBlock& peer = block(r);
    // Where process namespaces differ, the number may be that of another process.
    if (read_process_memory(peer.pid, &found, peer.mark_at, sizeof(found)) != 0 || found != peer.mark) return false;
  }
  return true;
}

void NodeSession::read(int rank, void* to, uint64_t from, size_t bytes, const std::function<std::string()>& what) {
  constexpr size_t kAtOnce = size_t{1} << 20;  // so that a failure is noticed soon
  auto* next = static_cast<std::byte*>(to);
  for (size_t n = 0; bytes > 0; next += n, from += n, bytes -= n) {
    n = std::min(bytes, kAtOnce);
    const int error = read_process_memory(block(rank).pid, next, from, n);
    failure_->check();
    if (error == 0) continue;
    // The memory of a process that dies goes before the process does.
    const Deadline patience = Deadline::after(std::chrono::seconds(1));
    do {
      failure_->check();
      if (const char* const gone = absence(rank)) lost(rank, gone, what());
      ::sched_yield();
    } while (!patience.passed());
    if (error == ESRCH) lost(rank, kDied, what());
    throw SystemError(describe(rank_) + " cannot read the memory of " + describe(rank) + " during " + what() +
                          "; set OURS_DIRECT=0 if this happens again",
                      error);
  }
}

void NodeSession::leave() noexcept {
  if (in_child()) return;
  if (leaving_.exchange(true)) return;
  try {
    const std::string reason = failure_since(made_);
    std::memcpy(self().reason, reason.data(), std::min(reason.size(), kMaxReason));
  } catch (const std::exception&) {
    // Out of memory: it leaves without a reason.
  }
  // Release: a peer that sees that this rank has left also reads the reason.
  self().state.store(kLeft, std::memory_order_release);
  futex_wake_all(self().monitor.value);
  for (const size_t parity : {0U, 1U}) futex_wake_all(opening(parity).passed.value);
  // Receivers from any source sleep on their own doorbells.
  for (int r = 0; r < size_; ++r) signal(block(r).doorbell);
}

void NodeSession::refuse(uint64_t call, const std::string& why) noexcept {
  if (in_child()) return;
  Refusal& place = self().refusals[refusals_++ % kRefusals];
  place.seq.store(0, std::memory_order_relaxed);
  const size_t length = std::min(why.size(), sizeof(place.why) - 1);
  std::memcpy(place.why, why.data(), length);
  place.why[length] = '\0';
  // Release: a peer that reads the number also reads the text.
  place.seq.store(call, std::memory_order_release);
}

std::string NodeSession::refusal(int rank, uint64_t call) const {
  for (const Refusal& one : block(rank).refusals) {
    if (one.seq.load(std::memory_order_acquire) != call) continue;
    return {one.why, ::strnlen(one.why, sizeof(one.why))};
  }
  return "";
}

bool NodeSession::in_child() const { return !owner_.is_here(); }

std::string NodeSession::describe(int rank) const {
  const RankBlock& peer = block(rank);
  const std::string name = "rank " + std::to_string(number_of(rank));
  const bool known = peer.state.load(std::memory_order_acquire) != kAbsent;
  return known ? name + ' ' + process_name(peer.host, peer.pid) : name;
}

std::string NodeSession::call_roll(const std::vector<int>& ranks) const {
  std::vector<AskedRank> asked;
  asked.reserve(ranks.size());
  for (const int r : ranks) asked.push_back({number_of(r), block(r).whereabouts});
  return roll_call(asked);
}

bool NodeSession::has_died(int rank) const {
  // In this order: it may leave and end between two looks.
  return watches_[static_cast<size_t>(rank)].ended() && block(rank).state.load(std::memory_order_acquire) != kLeft;
}

const char* NodeSession::absence(int rank) const {
  if (has_died(rank)) return kDied;
  if (block(rank).state.load(std::memory_order_acquire) != kLeft) return nullptr;
  return kLeftGroup;
}

std::string NodeSession::reason(int rank) const {
  const RankBlock& peer = block(rank);
  if (peer.state.load(std::memory_order_acquire) != kLeft) return "";
  return describe_reason("rank " + std::to_string(number_of(rank)), {peer.reason, ::strnlen(peer.reason, kMaxReason)});
}

void NodeSession::check_interrupts(Interrupts& interrupts, const std::function<std::string()>& what) {
  const std::string name = interrupts.look();
  if (name.empty()) return;
  failure_->raise(FailureKind::System, describe_interrupt(describe(rank_), name, "during " + what()));
}

void NodeSession::lost(int rank, const char* why, const std::string& what) {
  // A rank may have left because another one died.
  for (int r = 0; r < size_; ++r) {
    if (!has_died(r)) continue;
    rank = r;
    why = kDied;
    break;
  }
  failure_->raise(FailureKind::Peer, lost_peer(describe(rank), why, " during " + what, describe(rank_)) + reason(rank));
}

}  // namespace ours
