// The chat: what is said, sent and shown. The panel beside it is panel.js.

import { markdown } from "./markdown.js";
import { startPanel } from "./panel.js";

const $ = (id) => document.getElementById(id);
const OPTIONS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];
let messages = [];
let running = null;

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function save() {
  localStorage.setItem("chat", JSON.stringify(messages));
  for (const id of OPTIONS) localStorage.setItem(id, $(id).value);
  sessionStorage.setItem("key", $("key").value);
}

function restore() {
  for (const id of OPTIONS) $(id).value = localStorage.getItem(id) ?? $(id).value;
  $("key").value = sessionStorage.getItem("key") ?? "";
  try {
    messages = JSON.parse(localStorage.getItem("chat")) ?? [];
  } catch {
    messages = [];
  }
  for (const message of messages) show(message);
  update();
}

function show(message) {
  const article = document.createElement("article");
  const title = document.createElement("h3");
  const body = document.createElement("div");
  article.className = message.role;
  title.textContent = { user: "You", assistant: "Model", error: "Error" }[message.role];
  article.append(title, body);
  $("messages").append(article);
  write(body, message);
  return body;
}

function write(body, message) {
  const log = $("messages");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  body.replaceChildren();
  if (message.reasoning_content) {
    const reasoning = document.createElement("div");
    reasoning.className = "reasoning";
    reasoning.append(markdown(message.reasoning_content));
    body.append(reasoning);
  }
  body.append(markdown(message.content));
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function update() {
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("regenerate").disabled = running !== null || !messages.some((message) => message.role === "user");
}

function request() {
  const body = { stream: true, stream_options: { include_usage: true } };
  const said = messages.filter((message) => message.role !== "error");
  const system = $("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...said.map(({ role, content }) => ({ role, content }))];
  for (const id of OPTIONS.slice(1)) if ($(id).value !== "") body[id] = Number($(id).value);
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function answer() {
  running = new AbortController();
  update();
  $("status").textContent = "Waiting for the first token…";
  const message = { role: "assistant", content: "" };
  let body = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        message.content += delta.content ?? "";
        if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
        body ??= show(message);
        write(body, message);
        $("status").textContent = "Answering…";
      }
      if (event.timings) {
        const { predicted_n: count, predicted_per_second: rate, prompt_n: prompt, cache_n: cached } = event.timings;
        $("status").textContent = `${count} tokens at ${rate.toFixed(1)} tok/s; prompt ${prompt} new, ${cached} kept.`;
      }
    }
    if (!body) show(message);
    messages.push(message);
  } catch (error) {
    if (body) messages.push(message);
    if (error.name === "AbortError") {
      $("status").textContent = "Stopped.";
    } else {
      const said = { role: "error", content: error.message };
      messages.push(said);
      show(said);
      $("status").textContent = "The answer failed.";
    }
  } finally {
    running = null;
    update();
    save();
    $("prompt").focus();
  }
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  const message = { role: "user", content: text };
  messages.push(message);
  show(message);
  answer();
}

function regenerate() {
  while (messages.length && messages.at(-1).role !== "user") {
    messages.pop();
    $("messages").lastElementChild.remove();
  }
  answer();
}

function clear() {
  running?.abort();
  messages = [];
  $("messages").replaceChildren();
  $("status").textContent = "";
  save();
  update();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

function togglePanel() {
  const panel = $("panel");
  panel.hidden = !panel.hidden;
  $("panel-toggle").setAttribute("aria-expanded", String(!panel.hidden));
}

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
$("form").addEventListener("submit", send);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("regenerate").addEventListener("click", regenerate);
$("clear").addEventListener("click", clear);
$("theme").addEventListener("click", switchTheme);
$("panel-toggle").addEventListener("click", togglePanel);
$("options").addEventListener("change", save);
restore();
startPanel(headers);
$("prompt").focus();
