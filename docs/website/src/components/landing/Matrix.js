import React from 'react';
import Link from '@docusaurus/Link';
import Scrollable from '../Scrollable.js';
import State from './State.js';
import useText from './useText.js';

/**
 * @typedef {import('./useText.js').Text} Text
 * @typedef {{state: 'yes' | 'no' | 'planned' | 'partial', note?: Text}} Cell
 * @typedef {{columns: {key: string, label: Text, state: string}[],
 *   rows: {key: string, label: Text, group?: Text, page: string | null, cells: Record<string, Cell>}[]}} MatrixData
 */

/**
 * @param {{matrix: MatrixData, label: string}} props
 */
export default function Matrix({matrix: {columns, rows}, label}) {
  const text = useText();
  return (
    <Scrollable className="matrix-frame" label={label}>
      <table className="matrix">
        <thead>
          <tr>
            <th scope="col">{label}</th>
            {columns.map(({key, label: name, state}) => (
              <th key={key} scope="col" data-state={state}>
                <code>{text(name)}</code>
                {state === 'planned' && <State state={state} />}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(({key, label: name, page, cells}) => (
            <tr key={key}>
              <th scope="row">{page ? <Link to={`/docs/${page}`}>{text(name)}</Link> : text(name)}</th>
              {columns.map((column) => (
                <td key={column.key} data-state={column.state}>
                  <State state={cells[column.key].state} />
                  {cells[column.key].note && <small>{text(cells[column.key].note)}</small>}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Scrollable>
  );
}
