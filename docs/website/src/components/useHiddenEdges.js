import {useEffect, useState} from 'react';

/**
 * Marks a frame at the edges beyond which it scrolls, which then fade.
 *
 * @param {React.RefObject<HTMLElement>} ref
 * @returns {boolean} Whether the content is wider than the frame.
 */
export default function useHiddenEdges(ref) {
  const [isWide, setWide] = useState(false);
  useEffect(() => {
    const frame = ref.current;
    const mark = () => {
      const hidden = frame.scrollWidth - frame.clientWidth;
      frame.toggleAttribute('data-hides-start', frame.scrollLeft > 1);
      frame.toggleAttribute('data-hides-end', frame.scrollLeft < hidden - 1);
      setWide(hidden > 0);
    };
    const observer = new ResizeObserver(mark);
    observer.observe(frame);
    frame.addEventListener('scroll', mark, {passive: true});
    return () => {
      observer.disconnect();
      frame.removeEventListener('scroll', mark);
    };
  }, [ref]);
  return isWide;
}
