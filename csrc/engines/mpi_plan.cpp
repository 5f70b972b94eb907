#include "engines/mpi_plan.h"

#include <algorithm>
#include <random>
#include <set>
#include <sstream>

#include "common/error.h"

namespace ours::mpi {

namespace {

constexpr const char* kPlanKey = "plan";
constexpr const char* kError = "error ";
constexpr const char* kOtherwise = ", or send over TCP: OURS_INTERNODE=tcp";

std::string info_key(int rank) { return "rank/" + std::to_string(rank); }

bool is_open_mpi(const std::string& library) { return library.rfind("Open MPI", 0) == 0; }

std::string describe(const RankInfo& info) {
  if (info.state == RankInfo::State::Alone) return "was not started by a launcher of MPI's";
  return "is rank " + std::to_string(info.rank) + " of the job '" + info.job + "'";
}

/// How to start ranks so that they are one MPI job.
std::string advice(const std::string& library) {
  const std::string mpirun = is_open_mpi(library) ? "mpirun" : "mpiexec";
  return "Start all ranks by one " + mpirun + " (ourddp.init() finds rank and size there)" + kOtherwise;
}

void check_alike(const std::vector<RankInfo>& infos) {
  for (size_t rank = 0; rank < infos.size(); ++rank) {
    if (infos[rank].state == RankInfo::State::Failed) {
      throw Error("rank " + std::to_string(rank) + " cannot send by MPI: " + infos[rank].text);
    }
  }
  for (size_t rank = 0; rank < infos.size(); ++rank) {
    if (infos[rank].library != infos[0].library) {
      throw Error("rank 0 has " + infos[0].library + " and rank " + std::to_string(rank) + " has " +
                  infos[rank].library + ": all have to use the same MPI" + kOtherwise);
    }
  }
}

}  // namespace

RankInfo RankInfo::failure(std::string text) {
  RankInfo info;
  info.text = std::move(text);
  return info;
}

std::string RankInfo::write() const {
  return std::to_string(static_cast<int>(state)) + "\n" + std::to_string(rank) + "\n" + job + "\n" + library + "\n" +
         text;
}

RankInfo RankInfo::read(const std::string& written) {
  std::istringstream in(written);
  RankInfo info;
  int state = 0;
  in >> state >> info.rank;
  in.ignore(1);
  std::getline(in, info.job);
  std::getline(in, info.library);
  std::getline(in, info.text, '\0');
  info.state = static_cast<State>(state);
  return info;
}

std::string Plan::write() const {
  std::ostringstream out;
  out << nonce;
  for (const int rank : ranks) out << ' ' << rank;
  return out.str();
}

Plan Plan::read(const std::string& written) {
  std::istringstream in(written);
  Plan plan;
  in >> plan.nonce;
  for (int rank = 0; in >> rank;) plan.ranks.push_back(rank);
  return plan;
}

Plan make_plan(const std::vector<RankInfo>& infos, unsigned nonce) {
  check_alike(infos);
  const std::string& library = infos[0].library;
  Plan plan;
  plan.nonce = nonce;
  const auto is_alone = [](const RankInfo& info) { return info.state == RankInfo::State::Alone; };
  if (std::all_of(infos.begin(), infos.end(), is_alone)) {
    throw Error("the ranks were not started by a launcher of " + library + ", which connects no other processes. " +
                advice(library));
  }
  std::set<int> seen;
  for (size_t rank = 0; rank < infos.size(); ++rank) {
    const RankInfo& info = infos[rank];
    if (is_alone(info) || info.job != infos[0].job || !seen.insert(info.rank).second) {
      throw Error("the ranks are not different processes of one MPI job: rank 0 " + describe(infos[0]) + ", rank " +
                  std::to_string(rank) + " " + describe(info) + ". " + advice(library));
    }
    plan.ranks.push_back(info.rank);
  }
  return plan;
}

Plan agree(const MpiMeeting& meeting, const RankInfo& info) {
  KeyValues& keys = *meeting.keys;
  if (meeting.rank != 0) {
    keys.set(info_key(meeting.rank), info.write());
    const std::string plan = keys.get(kPlanKey, meeting.deadline);
    if (plan.rfind(kError, 0) == 0) throw Error(plan.substr(std::string(kError).size()));
    return Plan::read(plan);
  }
  std::vector<RankInfo> infos = {info};
  try {
    for (int rank = 1; rank < meeting.size; ++rank) {
      infos.push_back(RankInfo::read(keys.get(info_key(rank), meeting.deadline)));
    }
    const Plan plan = make_plan(infos, std::random_device{}());
    keys.set(kPlanKey, plan.write());
    return plan;
  } catch (const TimeoutError&) {
    throw TimeoutError("rank " + std::to_string(infos.size()) + " did not say that it can send by MPI within " +
                       std::to_string(meeting.deadline.timeout().count()) + " ms. Did it fail?");
  } catch (const Error& e) {
    keys.set(kPlanKey, kError + std::string(e.what()));
    throw;
  }
}

}  // namespace ours::mpi
