//! The shape of the heap's folder (`heap/src`): who knows whom, where the methods of a type stand,
//! how long files are.
//!
//! What is wished for: no cycle of files, an `impl X` in X's file or in its children, at most 600
//! lines a file. Where the heap is not there yet, a bar holds what has been reached: it is lowered
//! with each step, and nothing may become worse.
//!
//! And of the whole repository: no line has more than 100 columns ([`columns`]).

mod columns;
mod files;
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use modules::Module;

/// The most lines of a file.
const LINES: usize = 600;

/// What was reached, which is what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Figures {
    /// Files above [`LINES`].
    long: usize,
    /// Files in cycles of files.
    in_cycles: usize,
    /// Files with an `impl X` that are neither X's nor below it, a pair of file and type each.
    foreign_impls: usize,
}

const REACHED: Figures = Figures { long: 0, in_cycles: 0, foreign_impls: 0 };

/// What the folder is like, each finding by name.
#[derive(Debug)]
struct Findings {
    long: Vec<(String, usize)>,
    cycles: Vec<Vec<String>>,
    foreign_impls: BTreeSet<(String, String)>,
    /// Methods and files of each type.
    methods: BTreeMap<String, (usize, BTreeSet<String>)>,
    lines: usize,
    files: usize,
}

/// Prints what the heap is like, and fails where it has become worse or a line is too long.
pub fn check(root: &Path) -> Result<(), String> {
    let findings = look(&files::read(&root.join("heap/src"), "heap")?);
    print!("{}", findings.text());
    findings.judge(REACHED)?;
    columns::check(root)
}

fn look(modules: &[Module]) -> Findings {
    let names: BTreeMap<&str, usize> =
        modules.iter().enumerate().map(|(at, module)| (module.path.as_str(), at)).collect();
    let mut graph = DiGraphMap::<usize, ()>::new();
    let mut home: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (at, module) in modules.iter().enumerate() {
        graph.add_node(at);
        for path in &module.paths {
            if let Some(other) = longest_prefix(&names, path).filter(|&other| other != at) {
                graph.add_edge(at, other, ());
            }
        }
        for name in &module.types {
            home.entry(name).or_default().insert(at);
        }
    }
    let mut cycles: Vec<Vec<String>> = tarjan_scc(&graph)
        .into_iter()
        .filter(|cycle| cycle.len() > 1)
        .map(|cycle| sorted(cycle.into_iter().map(|at| modules[at].path.clone()).collect()))
        .collect();
    cycles.sort();
    let mut foreign_impls = BTreeSet::new();
    let mut methods: BTreeMap<String, (usize, BTreeSet<String>)> = BTreeMap::new();
    for module in modules {
        for block in &module.impls {
            let Some(homes) = home.get(block.of.as_str()) else { continue };
            let (count, files) = methods.entry(block.of.clone()).or_default();
            *count += block.methods;
            files.insert(module.path.clone());
            let is_below = |at: &usize| is_at_or_below(&module.path, &modules[*at].path);
            let is_of_the_trait = block
                .of_trait
                .as_deref()
                .is_some_and(|name| home.get(name).is_some_and(|homes| homes.iter().any(is_below)));
            if !homes.iter().any(is_below) && !is_of_the_trait {
                foreign_impls.insert((module.path.clone(), block.of.clone()));
            }
        }
    }
    let long = modules.iter().filter(|module| module.lines > LINES);
    Findings {
        long: long.map(|module| (module.path.clone(), module.lines)).collect(),
        cycles,
        foreign_impls,
        methods,
        lines: modules.iter().map(|module| module.lines).sum(),
        files: modules.len(),
    }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

/// The module of `path`'s longest beginning.
fn longest_prefix(names: &BTreeMap<&str, usize>, path: &str) -> Option<usize> {
    let mut rest = path;
    loop {
        if let Some(&found) = names.get(rest) {
            return Some(found);
        }
        rest = rest.rsplit_once("::")?.0;
    }
}

fn is_at_or_below(path: &str, other: &str) -> bool {
    path.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

impl Findings {
    fn figures(&self) -> Figures {
        Figures {
            long: self.long.len(),
            in_cycles: self.cycles.iter().map(Vec::len).sum(),
            foreign_impls: self.foreign_impls.len(),
        }
    }

    fn text(&self) -> String {
        let mut lines = vec![format!("{} lines in {} files", self.lines, self.files)];
        lines.extend(self.long.iter().map(|(path, count)| format!("{count} lines: {path}")));
        lines.extend(self.cycles.iter().map(|cycle| format!("a cycle: {}", cycle.join(", "))));
        let mut by_type: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (file, of) in &self.foreign_impls {
            by_type.entry(of).or_default().push(file);
        }
        lines
            .extend(by_type.iter().map(|(of, files)| format!("impl {of} in {}", files.join(", "))));
        let many = self.methods.iter().filter(|(_, (count, _))| *count >= 20);
        lines.extend(many.map(|(name, (count, files))| {
            format!("{name}: {count} methods in {} files", files.len())
        }));
        lines.join("\n") + "\n"
    }

    fn judge(&self, reached: Figures) -> Result<(), String> {
        let now = self.figures();
        if now == reached {
            return Ok(());
        }
        let better = now.long <= reached.long
            && now.in_cycles <= reached.in_cycles
            && now.foreign_impls <= reached.foreign_impls;
        Err(if better {
            format!(
                "the heap's folder has become better: {now:?}; lower the bar in \
                 xtask/src/house/mod.rs"
            )
        } else {
            format!("the heap's folder has become worse: {now:?}, and it was {reached:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(files: &[(&str, &str)]) -> Findings {
        let modules: Vec<_> =
            files.iter().map(|(path, text)| modules::parse(path, text).unwrap()).collect();
        look(&modules)
    }

    #[test]
    fn files_that_know_each_other_are_a_cycle_and_those_in_a_row_are_none() {
        let row = [
            ("heap", "pub mod a; mod b;"),
            ("heap::a", "use super::b::B;"),
            ("heap::b", "pub struct B;"),
        ];
        assert!(parsed(&row).cycles.is_empty());
        let ring = [
            ("heap", "pub mod a; mod b; pub struct Shared;"),
            ("heap::a", "use super::b::B; use super::Shared;"),
            ("heap::b", "pub struct B; fn f() -> u32 { crate::a::g() }"),
        ];
        assert_eq!(parsed(&ring).cycles, [["heap::a", "heap::b"]]);
    }

    #[test]
    fn a_file_that_uses_what_it_declares_knows_it() {
        let files = [
            ("heap", "mod a; pub struct Shared; fn f() { a::g() }"),
            ("heap::a", "use super::Shared;"),
        ];
        assert_eq!(parsed(&files).cycles, [["heap", "heap::a"]]);
    }

    #[test]
    fn what_only_tests_use_and_what_is_declared_binds_nobody() {
        let files = [
            ("heap", "mod a; mod b; pub use a::A;"),
            (
                "heap::a",
                "use super::A as _; pub struct A; #[cfg(test)] mod tests \
                 { use super::super::b::B; }",
            ),
            ("heap::b", "use super::a::A; pub struct B(A);"),
        ];
        assert!(parsed(&files).cycles.is_empty());
    }

    #[test]
    fn an_impl_stands_in_its_type_s_file_below_it_or_with_its_trait() {
        let files = [
            ("heap::a", "pub struct A; impl A { fn f(&self) {} }"),
            ("heap::a::b", "impl super::A { fn g(&self) {} fn h(&self) {} }"),
            ("heap::c", "use super::a::A; pub trait C {} impl C for A {}"),
            ("heap::d", "use super::a::A; impl A { fn i(&self) {} }"),
            ("heap::e", "impl From<u32> for super::a::A { fn from(_: u32) -> Self { Self } }"),
        ];
        let found = parsed(&files);
        let pair = |file: &str| (file.to_owned(), "A".to_owned());
        assert_eq!(found.foreign_impls, BTreeSet::from([pair("heap::d"), pair("heap::e")]));
        assert_eq!(found.methods["A"].0, 5);
    }

    #[test]
    fn the_bar_is_exact() {
        let found = parsed(&[("heap::a", "pub struct A;"), ("heap::b", "impl super::a::A {}")]);
        let reached = found.figures();
        assert_eq!(found.judge(reached), Ok(()));
        let fewer = Figures { foreign_impls: 0, ..reached };
        assert!(found.judge(fewer).unwrap_err().contains("worse"));
        assert!(found.judge(Figures { long: 1, ..reached }).unwrap_err().contains("lower the bar"));
    }
}
