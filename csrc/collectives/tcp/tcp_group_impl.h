#pragma once

#include "collectives/call_record.h"
#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_facts.h"
#include "collectives/tcp/tcp_group.h"
#include "common/error.h"

// What the files that implement TcpGroup share.
