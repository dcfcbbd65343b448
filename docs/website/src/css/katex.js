// KaTeX is rendered at build time; the pages need its style sheet and fonts only, from the bundle.
import 'katex/dist/katex.min.css';
