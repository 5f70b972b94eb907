#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/joining/rendezvous.h"
#include "transport/engine.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// A torch.distributed backend to make for the ranks of a group.
struct BackendRequest {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;  ///< for this backend alone
  int rank;
  int size;
  std::chrono::milliseconds timeout;  ///< for the ranks to come together
  std::string address;                ///< of this rank, if the backend can choose one; may be empty
};

/// Makes torch's backends by name. Python implements it, since torch keeps their names there.
class BackendMaker {
 public:
  virtual ~BackendMaker() = default;
  /// Why such a backend is impossible, or does not serve CPU memory; empty if it can be made.
  virtual std::string obstacle(const std::string& name) = 0;
  /// Waits for peers. Throws Error.
  virtual c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) = 0;
};

/// Called before groups are made that need a backend. The maker is never deleted.
void set_backend_maker(std::unique_ptr<BackendMaker> maker);

/// Returns when all ranks have called it. Throws the same Error on all of them if OURS_INTERNODE names different
/// engines on two ranks, or one that a rank cannot use.
void agree_on_engine(Rendezvous& rendezvous);

/// Makes the engine that OURS_INTERNODE names; null for tcp. Returns when all ranks have theirs. Throws Error on all
/// ranks if one of them cannot make it. `card`: where this rank can be reached.
std::shared_ptr<Engine> make_engine(Rendezvous& rendezvous, const TcpCard& card);

}  // namespace ours
