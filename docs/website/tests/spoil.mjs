/**
 * A script that does something again and again once React has taken over the page, whatever React does about it.
 *
 * @param {string} code
 */
export const repeat = (code) =>
  `<script>setInterval(()=>{if(document.documentElement.dataset.hasHydrated){${code}}},5)</script>`;
