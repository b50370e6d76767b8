// Sets every formula of the page. A formula that KaTeX refuses stays as TeX, and the error reaches the console,
// where the tests look for it.
for (const element of document.querySelectorAll("span.math, div.math > .formula")) {
  const tex = element.textContent;
  try {
    katex.render(tex, element, { displayMode: element.matches(".formula"), output: "htmlAndMathml", strict: "error" });
  } catch (error) {
    element.textContent = tex;
    console.error(`cannot set the formula ${tex}: ${error.message}`);
  }
}
