-- Holds requests while no replica is up, reports how many are held, and chooses those of a canary. Loaded by the configuration of config.py,
-- which sets the variables (HAProxy 2.6 passes no arguments to a script).
--
-- HAProxy runs with one thread (nbthread 1), so that all requests share the tables below.

local backend = os.getenv("HOLD_BACKEND")
local bound = tonumber(os.getenv("HOLD_MOST"))
local seconds = tonumber(os.getenv("HOLD_SECONDS"))

local POLL_MILLISECONDS = 25 -- a request waits no longer than this once a replica is up
local LOST_SECONDS = 1 -- a waiter that has not polled for this long is gone

-- Every waiter records its last poll. A client that disconnects ends its waiter in the middle of a sleep, without
-- further code being run: a plain counter would never be decremented.
local waiters = {}
local held = 0
local held_by = {} -- by client address
local refused = {full = 0, late = 0, queue = 0, unauthorized = 0}
local open_requests = 0
local keys = {} -- SHA-256 hashes of the accepted keys, as the control process sends them
local ready = false
local draining = false

local function now()
  local time = core.now()
  return time.sec + time.usec / 1e6
end

local function admit(waiter)
  waiters[waiter] = true
  held = held + 1
  held_by[waiter.client] = (held_by[waiter.client] or 0) + 1
end

local function dismiss(waiter)
  if waiters[waiter] then
    waiters[waiter] = nil
    held = held - 1
    local left = held_by[waiter.client] - 1
    held_by[waiter.client] = left > 0 and left or nil
  end
end

-- Makes room for a request of this client when all places are taken: the client with the most held requests gives up
-- its newest one, if it has at least two more than this client. False: there is no such client.
local function make_room(client)
  local most, heaviest = (held_by[client] or 0) + 1, nil
  for other, count in pairs(held_by) do
    if count > most then most, heaviest = count, other end
  end
  if not heaviest then return false end
  local newest
  for waiter in pairs(waiters) do
    if waiter.client == heaviest and (not newest or waiter.begin > newest.begin) then newest = waiter end
  end
  newest.displaced = true
  dismiss(newest)
  return true
end

-- HAProxy 3.0 does not read from a client while an action sleeps, and so does not notice that it leaves; the kernel's
-- table of connections shows it. A row has the ports of both ends, and 01 for a connection that neither end has closed.
local function open_connections()
  local found = {}
  for _, name in ipairs({"/proc/net/tcp", "/proc/net/tcp6"}) do
    local file = io.open(name)
    if file then
      for line in file:lines() do
        local own, other = string.match(line, "^%s*%d+: %x+:(%x+) %x+:(%x+) 01 ")
        if own then found[tonumber(own, 16) .. ":" .. tonumber(other, 16)] = true end
      end
      file:close()
    end
  end
  return found
end

-- Actions that sleep, held requests and questions for demand: their connections, by ports.
local sleepers = setmetatable({}, {__mode = "k"})

local function sleeper(txn)
  local one = {connection = txn.sf:dst_port() .. ":" .. txn.sf:src_port(), gone = false}
  sleepers[one] = true
  return one
end

core.register_task(function()
  while true do
    core.msleep(500)
    local oldest = now() - LOST_SECONDS
    for waiter in pairs(waiters) do
      if waiter.seen < oldest then dismiss(waiter) end
    end
    if next(sleepers) then
      local open = open_connections()
      -- Without a readable table none is in it.
      if next(open) then
        for one in pairs(sleepers) do one.gone = not open[one.connection] end
      end
    end
  end
end)

-- Routes, besides Anthropic's, of clients that send their key in x-api-key, such as LiteLLM.
local guards = {
  ["/beta/litellm_basic_guardrail_api"] = true, ["/request"] = true, ["/response"] = true, ["/v1/moderations"] = true,
}

local function has_key(txn)
  local headers = txn.http:req_get_headers()
  local given
  if headers["authorization"] then
    local scheme, token = string.match(headers["authorization"][0], "^(%S+)%s+(%S+)%s*$")
    if scheme and string.lower(scheme) == "bearer" then given = token end
  elseif headers["x-api-key"] and (guards[txn.f:path()] or string.match(txn.f:path(), "^/v1/messages%f[/\0]")) then
    given = string.match(headers["x-api-key"][0], "^%s*(%S+)%s*$") -- the replicas look closer
  end
  if not given then return false end
  -- A lookup by hash: its duration does not depend on how much of a key is right.
  return keys[string.lower(txn.c:hex(txn.c:sha2(given, 256)))] == true
end

-- Sets txn.key to "refused" for a request without a key: it starts no replica and is no load.
core.register_action("check_key", {"http-req"}, function(txn)
  if not has_key(txn) then
    refused.unauthorized = refused.unauthorized + 1
    txn:set_var("txn.key", "refused")
  end
end, 0)

-- Requests that need no key, where others do: pages and OPTIONS.
core.register_action("count_open", {"http-req"}, function(_)
  open_requests = open_requests + 1
end, 0)

-- Sets txn.held to how it ended: up, full, late, gone (the client left).
core.register_action("hold", {"http-req"}, function(txn)
  local client = txn.sf:src()
  if held >= bound and not (bound > 0 and make_room(client)) then
    refused.full = refused.full + 1
    txn:set_var("txn.held", "full")
    return
  end
  local begin = now()
  local waiter = {seen = begin, begin = begin, client = client}
  local connection = sleeper(txn)
  admit(waiter)
  local outcome = "late"
  while waiter.seen - begin < seconds do
    if txn.f:nbsrv(backend) > 0 then
      outcome = "up"
      break
    end
    core.msleep(POLL_MILLISECONDS)
    waiter.seen = now()
    if waiter.displaced then
      outcome = "full"
      break
    end
    if connection.gone then
      outcome = "gone"
      break
    end
  end
  sleepers[connection] = nil
  dismiss(waiter)
  if outcome == "full" then refused.full = refused.full + 1 end
  if outcome == "late" then refused.late = refused.late + 1 end
  txn:set_var("txn.held", outcome)
  txn:set_var("txn.held_time", math.floor((waiter.seen - begin) * 1000))
end, 0)

core.register_action("refuse", {"http-req"}, function(_)
  refused.queue = refused.queue + 1
end, 0)

-- The canary's servers have no weight. A random share of the requests names one of them, in turn; a server with as many
-- requests as it may have gets no more, and they go to the others.
local canary_most = tonumber(os.getenv("CANARY_MOST"))
local canary = {percent = 0, servers = {}, last = 0, chosen = 0}

core.register_fetches("canary", function(txn)
  local servers = canary.servers
  if #servers == 0 or math.random() * 100 >= canary.percent then return "" end
  for _ = 1, #servers do
    canary.last = canary.last % #servers + 1
    local name = servers[canary.last]
    local known, count = pcall(txn.f.srv_conn, txn.f, backend .. "/" .. name)
    if known and count and count < canary_most then
      canary.chosen = canary.chosen + 1
      return name
    end
  end
  return ""
end)

core.register_fetches("draining", function(_) return draining and 1 or 0 end)

local function answer(applet, status, text, kind)
  applet:set_status(status)
  applet:add_header("content-type", kind or "text/plain; charset=utf-8")
  applet:add_header("content-length", tostring(#text))
  applet:start_response()
  applet:send(text)
end

local function family(lines, name, kind, help, samples)
  lines[#lines + 1] = "# HELP " .. name .. " " .. help
  lines[#lines + 1] = "# TYPE " .. name .. " " .. kind
  for _, sample in ipairs(samples) do lines[#lines + 1] = name .. sample[1] .. " " .. string.format("%d", sample[2]) end
end

local function metrics()
  local stats = core.backends[backend]:get_stats()
  local lines = {}
  -- The autoscaler adds replicas for what is counted here. Where keys are needed, no request without one is: those that
  -- are refused never come to this backend.
  family(lines, "penstock_gateway_requests_total", "counter", "Requests that came, answered or not",
    {{"", stats.stot - open_requests}})
  family(lines, "penstock_gateway_in_flight_requests", "gauge", "Requests that came and are not answered yet",
    {{"", stats.scur}})
  family(lines, "penstock_gateway_held_requests", "gauge", "Requests that wait because no replica is up", {{"", held}})
  family(lines, "penstock_gateway_queued_requests", "gauge", "Requests that wait because all replicas are busy",
    {{"", stats.qcur}})
  family(lines, "penstock_gateway_refused_requests_total", "counter",
    "Requests refused: too many held, held for too long, too many queued, without a key", {
      {'{reason="full"}', refused.full}, {'{reason="late"}', refused.late}, {'{reason="queue"}', refused.queue},
      {'{reason="unauthorized"}', refused.unauthorized}})
  family(lines, "penstock_gateway_retries_total", "counter", "Requests sent again to a replica", {{"", stats.wretr}})
  family(lines, "penstock_gateway_canary_requests_total", "counter", "Requests of the share of a canary",
    {{"", canary.chosen}})
  family(lines, "penstock_gateway_replicas", "gauge", "Replicas that take requests", {{"", stats.act}})
  return table.concat(lines, "\n") .. "\n"
end

-- Sets txn.demand to the number of held requests, as soon as there is one: the operator need not poll twice a second.
-- An action and no service: HAProxy 2.6 ends itself when the client of a service that sleeps leaves ("spinning").
core.register_action("demand", {"http-req"}, function(txn)
  local query = txn.f:query() or ""
  local until_when = now() + math.min(tonumber(string.match(query, "seconds=(%d+)") or "0"), 300)
  local connection = sleeper(txn)
  while held == 0 and not draining and not connection.gone and now() < until_when do core.msleep(POLL_MILLISECONDS) end
  sleepers[connection] = nil
  txn:set_var("txn.demand", held)
end, 0)

core.register_service("status", "http", function(applet)
  if applet.path == "/metrics" then
    answer(applet, 200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
  elseif applet.path == "/healthz" then
    answer(applet, 200, "ok\n")
  elseif applet.path == "/readyz" then
    if ready and not draining then answer(applet, 200, "ready\n") else answer(applet, 503, "not ready\n") end
  else
    answer(applet, 404, "there are /metrics, /metrics/haproxy, /demand, /healthz and /readyz\n")
  end
end)

local function reply(applet, text)
  applet:send(text .. "\n")
end

core.register_cli({"gateway", "ready"}, "gateway ready: the replicas are known", function(applet) ready = true; reply(applet, "ready") end)
core.register_cli({"gateway", "drain"}, "gateway drain: no connection outlives its answer", function(applet) draining = true; reply(applet, "draining") end)
-- The hashes come in several commands, as a command has room for some hundreds: they are accepted with the last one.
local arriving = {}
core.register_cli({"gateway", "keys"}, "gateway keys first|more|last: hashes of the accepted keys, with commas", function(applet, ...)
  local words = {...}
  local part, hashes = words[#words - 1], words[#words]
  if part == "first" then arriving = {} end
  for hash in string.gmatch(hashes or "", "%x+") do
    if #hash == 64 then arriving[hash] = true end
  end
  if part == "last" then keys = arriving end
  reply(applet, "known")
end)
core.register_cli({"gateway", "canary"}, "gateway canary: its percentage, and its servers with commas", function(applet, ...)
  local words = {...}
  canary.percent, canary.servers, canary.last = 0, {}, 0
  for at, word in ipairs(words) do
    if string.match(word, "^%d+$") and words[at - 1] == "canary" then
      canary.percent = tonumber(word)
      for name in string.gmatch(words[at + 1] or "", "[^,]+") do table.insert(canary.servers, name) end
    end
  end
  reply(applet, "known")
end)
core.register_cli({"gateway", "held"}, "gateway held: how many requests are held", function(applet)
  reply(applet, tostring(held))
end)
