// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing a model writes can be markup or script.

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, found.index));
    const [whole, code, strong, emphasis, label, address] = found;
    if (code !== undefined) nodes.push(element("code", code));
    else if (strong !== undefined) nodes.push(element("strong", ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(element("em", ...inline(emphasis)));
    else {
      const link = element("a", label);
      link.href = address;
      link.rel = "noreferrer noopener";
      nodes.push(link);
    }
    end = found.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function codeBlock(lines, from) {
  let end = from + 1;
  while (end < lines.length && !lines[end].startsWith("```")) end++;
  const code = element("code", lines.slice(from + 1, end).join("\n"));
  const block = element("pre", code);
  block.tabIndex = 0;
  return [block, end + 1];
}

function list(lines, from, pattern, name) {
  const items = [];
  let at = from;
  for (; at < lines.length && pattern.test(lines[at]); at++) items.push(element("li", ...inline(lines[at].replace(pattern, ""))));
  return [element(name, ...items), at];
}

export function markdown(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) fragment.append(element("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    let block = null;
    let next = at + 1;
    if (line.startsWith("```")) [block, next] = codeBlock(lines, at);
    else if (/^\s*[-*+] /.test(line)) [block, next] = list(lines, at, /^\s*[-*+] /, "ul");
    else if (/^\s*\d+[.)] /.test(line)) [block, next] = list(lines, at, /^\s*\d+[.)] /, "ol");
    else if (/^#{1,6} /.test(line)) block = element("p", element("strong", ...inline(line.replace(/^#+ /, ""))));
    if (block || !line.trim()) flush();
    if (block) fragment.append(block);
    else if (line.trim()) paragraph.push(line);
    at = next;
  }
  flush();
  return fragment;
}
