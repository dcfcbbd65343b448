import React, {useEffect, useRef, useState} from 'react';

/**
 * Content that may be wider than its place. Only while it is, the keyboard can reach it in order to scroll.
 *
 * @param {{as?: string, label: string, children: React.ReactNode}} props
 */
export default function Scrollable({as: Element = 'div', label, children, ...props}) {
  const ref = useRef(null);
  const [isWide, setWide] = useState(false);
  useEffect(() => {
    const frame = ref.current;
    const observer = new ResizeObserver(() => setWide(frame.scrollWidth > frame.clientWidth));
    observer.observe(frame);
    return () => observer.disconnect();
  }, []);
  const reachable = isWide ? {tabIndex: 0, role: 'region', 'aria-label': label} : {};
  return (
    <Element ref={ref} {...props} {...reachable}>
      {children}
    </Element>
  );
}
