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

/// A backend of torch.distributed that is to be made for the ranks of a group.
struct BackendRequest {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;  ///< for it alone
  int rank;
  int size;
  std::chrono::milliseconds timeout;  ///< for its ranks to come together
  std::string address;                ///< of this rank, where it has a choice; may be empty
};

/// Who knows torch's backends by their names, which live in Python.
class BackendMaker {
 public:
  virtual ~BackendMaker() = default;
  /// Why there can be no such backend, or one that does not serve CPU memory; empty if there can.
  virtual std::string obstacle(const std::string& name) = 0;
  /// Waits for peers. Throws Error.
  virtual c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) = 0;
};

/// To be called before groups are made that need it. Null: none.
void set_backend_maker(std::shared_ptr<BackendMaker> maker);

/// Returns when all ranks have called it. Throws Error, the same on all, where OURS_INTERNODE names
/// different engines on two of them, or one that a rank cannot have.
void agree_on_engine(Rendezvous& rendezvous);

/// The engine that OURS_INTERNODE names; null for tcp. Returns when all ranks have it. Throws Error, on all ranks if
/// one of them cannot make it. `card`: where this rank can be reached.
std::shared_ptr<Engine> make_engine(Rendezvous& rendezvous, const TcpCard& card);

}  // namespace ours
