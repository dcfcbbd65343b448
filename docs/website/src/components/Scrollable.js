import React, {useRef} from 'react';
import useHiddenEdges from './useHiddenEdges.js';

/**
 * Content that may be wider than its place. Only while it is, the keyboard can reach it in order to scroll.
 *
 * @param {{as?: string, label: string, children: React.ReactNode}} props
 */
export default function Scrollable({as: Element = 'div', label, children, ...props}) {
  const ref = useRef(null);
  const reachable = useHiddenEdges(ref) ? {tabIndex: 0, role: 'region', 'aria-label': label} : {};
  return (
    <Element ref={ref} {...props} {...reachable}>
      {children}
    </Element>
  );
}
