#pragma once

#include <string>
#include <vector>

#include "engines/mpi_meeting.h"

// How the ranks of a group find out whether they are one MPI job: each publishes its RankInfo, and rank 0 makes a plan
// from all of them, which all ranks receive. This part needs no MPI.

namespace ours::mpi {

struct RankInfo {
  enum class State {
    Failed,    ///< it cannot take part, and `text` says why
    Running,   ///< MPI was initialised before
    Launched,  ///< MPI is not initialised, but a launcher started the process for it
    Alone,     ///< no launcher did
  };

  State state = State::Failed;
  int rank = -1;        ///< in the MPI job
  std::string job;      ///< see MpiLauncher
  std::string library;  ///< the MPI library, such as "Open MPI v5.0.11"
  std::string text;

  static RankInfo failure(std::string text);
  std::string write() const;
  static RankInfo read(const std::string& written);
};

struct Plan {
  unsigned nonce = 0;      ///< random, the same for all ranks
  std::vector<int> ranks;  ///< in the MPI job, by rank of the group

  std::string write() const;
  static Plan read(const std::string& written);
};

/// Makes the plan for ranks that have reported these. Throws Error, which says why they are not one job and what to do.
Plan make_plan(const std::vector<RankInfo>& infos, unsigned nonce);

/// Exchanges what all ranks report. Returns the same plan, or throws the same Error, on all ranks.
Plan agree(const MpiMeeting& meeting, const RankInfo& info);

}  // namespace ours::mpi
