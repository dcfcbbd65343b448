/** Links into the project's repository on the web, held against the files that are here. */

import {existsSync, readFileSync} from 'node:fs';
import {join} from 'node:path';

/** What the address of a file in a repository looks like, wherever that is: the revision, the file, its lines. */
const FILE = /^https?:\/\/.+?\/(?:edit|blob)\/([^/#]+)\/((?:docs|src)\/[^#]+)(?:#L(\d+)-L(\d+))?$/;
const MAIN = 'main';

export class Repository {
  /**
   * @param {string} address Where it is on the web; empty for nowhere.
   * @param {string} root The project's folder here.
   */
  constructor(address, root) {
    this.address = address;
    this.root = root;
    /** How many links have been looked at. */
    this.count = 0;
  }

  /**
   * What is wrong with a link, if it leads to a file of a repository.
   *
   * @param {string} address
   * @returns {string | null}
   */
  faultOf(address) {
    const [, revision, file, , last] = FILE.exec(address) ?? [];
    if (!file) {
      return null;
    }
    this.count += 1;
    if (!this.address || !address.startsWith(`${this.address}/`)) {
      const where = this.address ? `the repository is ${this.address}` : 'pyproject.toml names no repository';
      return `links to ${address}, and ${where}`;
    }
    if (revision !== MAIN) {
      return null;
    }
    const path = join(this.root, file);
    if (!existsSync(path)) {
      return `links to ${address}, and there is no such file`;
    }
    const lines = readFileSync(path, 'utf8').split('\n').length;
    return Number(last ?? 0) <= lines ? null : `links to ${address}, and that file has ${lines} lines`;
  }
}
