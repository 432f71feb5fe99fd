// The live panel: figures from the server once a second, as differences between two readings.

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
let before = null;
let peak = 0;

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(Math.floor(Math.log2(count) / 10), 4) : 0;
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
};
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

function figures(rows) {
  $("figures").replaceChildren(...rows.map(([name, value]) => {
    const group = document.createElement("div");
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    group.append(term, text);
    return group;
  }));
}

function bar(id, parts, whole) {
  $(id).replaceChildren(...parts.map(([color, value]) => {
    const part = document.createElement("span");
    part.style.width = `${whole > 0 ? (100 * value) / whole : 0}%`;
    part.style.background = `var(--${color})`;
    return part;
  }));
}

function showRates(now, then) {
  const seconds = (now.at - then.at) / 1000;
  const stream = now.stream, old = then.stream;
  const hits = stream.hits - old.hits, misses = stream.misses - old.misses;
  const read = (stream.bytes - old.bytes) / seconds;
  const engine = now.engine;
  figures([
    ["Tokens per second", ((engine.generated_tokens - then.engine.generated_tokens) / seconds).toFixed(1)],
    ["Prompt tokens per second", ((engine.prompt_tokens - then.engine.prompt_tokens) / seconds).toFixed(0)],
    ["Hit rate, now", percent(hits, hits + misses)],
    ["Hit rate, in all", percent(stream.hits, stream.hits + stream.misses)],
    ["Slots in use", `${now.slots_used} of ${stream.about.slots ?? 0}`],
    ["Running, waiting", `${engine.requests_running}, ${engine.requests_queued}`],
    ["KV cells in use", `${engine.kv_cells_used} of ${engine.kv_cells}`],
    ["Prompt kept", percent(engine.cached_tokens, engine.cached_tokens + engine.prompt_tokens)],
  ]);
  showDisk(read, stream.about.disk_limit_bytes_s ?? 0);
}

function showDisk(read, measured) {
  peak = Math.max(peak, read);
  const limit = Math.max(measured, peak);
  bar("disk", [["compute", read]], limit);
  const known = measured ? `${bytes(measured)}/s were measured at start` : "no limit was measured";
  const whole = limit === 0 ? "" : limit > measured ? "the bar ends at the most seen" : "the bar ends there";
  $("disk-text").textContent = `${bytes(read)}/s now, ${bytes(peak)}/s at most seen here; ${[known, whole].filter(Boolean).join(", ")}.`;
}

function showTime(stream) {
  const decode = stream.phases.decode;
  const parts = [["compute", decode.computing_s], ["stall", decode.stalled_s], ["lane", decode.lane_s]];
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  bar("time", parts, whole);
  const each = (value) => (decode.rows ? `${((1000 * value) / decode.rows).toFixed(2)} ms` : "–");
  $("time-text").textContent = `Per token: ${each(decode.computing_s)} computing, ${each(decode.stalled_s)} stalled on reads, ` +
    `${each(decode.lane_s)} bookkeeping. Reads: ${stream.read_mode}.`;
}

function showMemory(memory) {
  const plan = memory.plan;
  const planned = Object.values(plan).reduce((sum, value) => sum + value, 0);
  bar("memory", [["compute", memory.resident_bytes]], Math.max(planned, memory.resident_bytes));
  const parts = Object.entries(plan).map(([name, value]) => `${name} ${bytes(value)}`).join(", ");
  $("memory-text").textContent = `${bytes(memory.resident_bytes)} used; planned ${bytes(planned)} (${parts}).`;
}

function showHeat(heat) {
  const canvas = $("heat"), layers = heat.layers;
  const experts = Math.max(1, ...layers.map((layer) => layer.hotness.length));
  canvas.width = experts;
  canvas.height = Math.max(1, layers.length);
  canvas.style.height = `${Math.min(24 * layers.length, 420)}px`;
  const context = canvas.getContext("2d");
  layers.forEach((layer, row) => layer.hotness.forEach((hot, expert) => {
    const resident = layer.resident[expert];
    context.fillStyle = resident ? `hsl(178 ${20 + hot * 0.6}% ${85 - hot * 0.6}%)` : `hsl(30 ${hot * 0.8}% ${93 - hot * 0.35}%)`;
    context.fillRect(expert, row, 1, 1);
  }));
  const used = layers.reduce((sum, layer) => sum + layer.resident.reduce((a, b) => a + b, 0), 0);
  $("heat-text").textContent = `${layers.length} layers down, ${experts} experts across; green is in a slot (${used}), ` +
    `orange is on disk; the darker, the hotter.`;
  return used;
}

export function startPanel(headers) {
  async function read() {
    try {
      const response = await fetch("stats", { headers: headers() });
      if (!response.ok) throw new Error((await response.json()).error.message);
      const now = { at: performance.now(), ...(await response.json()) };
      $("model").textContent = `${now.model}, context of ${now.context_length} tokens`;
      now.slots_used = showHeat(now.heat);
      showRates(now, before ?? { ...now, at: now.at - EVERY_MS });
      showTime(now.stream);
      showMemory(now.memory);
      before = now;
    } catch (error) {
      $("model").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
    }
    setTimeout(read, EVERY_MS);
  }
  read();
}
