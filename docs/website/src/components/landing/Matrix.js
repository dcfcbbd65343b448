import React from 'react';
import Link from '@docusaurus/Link';
import Scrollable from '../Scrollable.js';
import State from './State.js';
import useText from './useText.js';

/** Labels that are names of the library are set as code. */
const IDENTIFIER = /^[A-Z]\w+$/;

/**
 * @typedef {import('./useText.js').Text} Text
 * @typedef {'yes' | 'no' | 'planned' | 'partial'} Cell
 * @typedef {{columns: {key: string, label: Text, state: string}[],
 *   rows: {key: string, label: Text, group?: Text, note?: Text, page: string | null, cells: Record<string, Cell>}[]}} MatrixData
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
                {IDENTIFIER.test(text(name)) ? <code>{text(name)}</code> : text(name)}
                {state === 'planned' && <State state={state} />}
              </th>
            ))}
          </tr>
        </thead>
        {groups(rows).map(({label: group, rows: members}) => (
          <tbody key={group?.en ?? ''}>
            {group && (
              <tr>
                <th scope="rowgroup" colSpan={columns.length + 1}>
                  {text(group)}
                </th>
              </tr>
            )}
            {members.map((row) => (
              <Row key={row.key} row={row} columns={columns} />
            ))}
          </tbody>
        ))}
      </table>
    </Scrollable>
  );
}

/** @param {{row: MatrixData['rows'][0], columns: MatrixData['columns']}} props */
function Row({row: {label, note, page, cells}, columns}) {
  const text = useText();
  return (
    <tr>
      <th scope="row">
        {page ? <Link to={`/docs/${page}`}>{text(label)}</Link> : text(label)}
        {note && <small>{text(note)}</small>}
      </th>
      {columns.map(({key, state}) => (
        <td key={key} data-state={state}>
          <State state={cells[key]} />
        </td>
      ))}
    </tr>
  );
}

/**
 * Neighbouring rows of one group.
 *
 * @param {MatrixData['rows']} rows
 */
function groups(rows) {
  const found = [];
  for (const row of rows) {
    if (found.length === 0 || found.at(-1).label?.en !== row.group?.en) {
      found.push({label: row.group, rows: []});
    }
    found.at(-1).rows.push(row);
  }
  return found;
}
