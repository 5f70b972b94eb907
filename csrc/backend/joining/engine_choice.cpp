#include "backend/joining/engine_choice.h"

#include <algorithm>
#include <atomic>

#include "common/error.h"
#include "common/options.h"
#include "engines/c10d/c10d_engine.h"
#include "engines/mpi_engine.h"

namespace ours {

namespace {

constexpr const char* kTcp = "tcp";
constexpr const char* kMpi = "mpi";
// Gloo releases its memory when it is aborted, and its end waits for nobody.
constexpr const char* kGloo = "gloo";

/// Never deleted, since what Python gave must not outlive Python.
std::atomic<BackendMaker*> backend_maker{nullptr};

std::string obstacle(const std::string& name) {
  if (name == kTcp) return "";
  if (name == kMpi) return mpi_obstacle();
  BackendMaker* const maker = backend_maker;
  if (maker == nullptr) return "only a Python program that has imported ourddp can make it; use tcp or mpi in others";
  return maker->obstacle(name);
}

/// Separates the name of a rank's engine from the reason why the rank cannot use it.
constexpr char kSeparator = '\n';

/// What is wrong with the ranks' choices; empty if they agree.
std::string fault_in(const std::vector<std::string>& choices, const std::string& group) {
  const std::string first = choices.front().substr(0, choices.front().find(kSeparator));
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    const std::string name = choices[rank].substr(0, choices[rank].find(kSeparator));
    if (name == first) continue;
    return "OURS_INTERNODE is '" + first + "' on rank 0 and '" + name + "' on rank " + std::to_string(rank) + " of " +
           group + "; it has to be the same on all ranks";
  }
  for (const std::string& choice : choices) {
    if (choice.size() > first.size()) return choice.substr(first.size() + 1);
  }
  return "";
}

std::shared_ptr<Engine> make_c10d_engine(const Rendezvous& rendezvous, const std::string& name, const TcpCard& card) {
  const Meeting& meeting = rendezvous.meeting();
  BackendRequest request;
  request.name = name;
  request.store = rendezvous.store("backend");
  request.rank = meeting.rank;
  request.size = meeting.size;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(rendezvous.deadline().at() - Clock::now());
  request.timeout = std::max(left, std::chrono::milliseconds(1));
  if (!card.addresses.empty()) request.address = card.addresses.front().host();
  return std::make_shared<C10dEngine>(name, backend_maker.load()->make(request), name == kGloo);
}

}  // namespace

void set_backend_maker(std::unique_ptr<BackendMaker> maker) { backend_maker = maker.release(); }

void agree_on_engine(Rendezvous& rendezvous) {
  const std::string& name = options().internode;
  std::string why;
  try {
    why = obstacle(name);
  } catch (const std::exception& e) {
    why = e.what();  // thrown only below, since the other ranks wait for this rank's choice
  }
  std::string choice = name;
  if (!why.empty()) {
    choice +=
        kSeparator + ("OURS_INTERNODE='" + name + "' cannot be used by ") + rendezvous.describe_self() + ": " + why;
  }
  const std::string& group = rendezvous.meeting().group;
  // A fault is the result of the round, so that all ranks throw it at once.
  const std::string fault =
      rendezvous.round("address", choice, [&](const auto& choices) { return fault_in(choices, group); });
  if (!fault.empty()) throw Error(fault);
}

std::shared_ptr<Engine> make_engine(Rendezvous& rendezvous, const TcpCard& card) {
  const std::string& name = options().internode;
  if (name == kTcp) return nullptr;
  const Meeting& meeting = rendezvous.meeting();
  std::shared_ptr<Engine> engine;
  try {
    engine = name == kMpi ? make_mpi_engine(meeting.rank, meeting.size, meeting.group, rendezvous.keys("mpi"),
                                            rendezvous.deadline())
                          : make_c10d_engine(rendezvous, name, card);
  } catch (const std::exception& e) {
    rendezvous.fail("OURS_INTERNODE='" + name + "': " + rendezvous.describe_self() + " cannot make it for " +
                    rendezvous.meeting().group + ": " + e.what());
  }
  rendezvous.arrive("engine");
  return engine;
}

}  // namespace ours
