import {translate} from '@docusaurus/Translate';

/**
 * The words for the parts of an entry. Each stands in a call of its own, because translations are looked up by
 * literal ids.
 *
 * @param {string} part
 */
export function partLabel(part) {
  const labels = {
    alias: translate({id: 'site.api.alias', message: 'Another name of'}),
    bases: translate({id: 'site.api.bases', message: 'Bases'}),
    parameters: translate({id: 'site.api.parameters', message: 'Parameters'}),
    attributes: translate({id: 'site.api.attributes', message: 'Attributes'}),
    returns: translate({id: 'site.api.returns', message: 'Returns'}),
    yields: translate({id: 'site.api.yields', message: 'Yields'}),
    raises: translate({id: 'site.api.raises', message: 'Raises'}),
    communication: translate({id: 'site.api.communication', message: 'Communication'}),
    example: translate({id: 'site.api.example', message: 'Example'}),
    members: translate({id: 'site.api.members', message: 'Members'}),
  };
  return labels[part];
}

/** @param {string} kind */
export function kindLabel(kind) {
  const labels = {
    class: translate({id: 'site.api.kind.class', message: 'class'}),
    exception: translate({id: 'site.api.kind.exception', message: 'exception'}),
    function: translate({id: 'site.api.kind.function', message: 'function'}),
    method: translate({id: 'site.api.kind.method', message: 'method'}),
    classmethod: translate({id: 'site.api.kind.classmethod', message: 'class method'}),
    staticmethod: translate({id: 'site.api.kind.staticmethod', message: 'static method'}),
    property: translate({id: 'site.api.kind.property', message: 'property'}),
    attribute: translate({id: 'site.api.kind.attribute', message: 'attribute'}),
    module: translate({id: 'site.api.kind.module', message: 'module'}),
    data: translate({id: 'site.api.kind.data', message: 'data'}),
  };
  return labels[kind] ?? kind;
}

export function sourceTitle() {
  return translate({id: 'site.api.source', message: 'Source code'});
}
