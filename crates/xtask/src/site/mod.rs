//! The documentation: checks every link of every page, and builds a site from `docs/` (mdBook;
//! `docs/SUMMARY.md` is its order, `book.toml` its settings).

mod links;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::parts::{output, succeed};
use crate::tools;
use links::Page;

/// The site's pages.
const PAGES: &str = "docs";
/// Their order.
const SUMMARY: &str = "docs/SUMMARY.md";
/// mdBook's source folder, with the site's links; `book.toml` names its output folder.
const SOURCE: &str = "target/site/source";
const BOOK: &str = "target/site/book";
/// Address of the repository's files, for readers of the site.
const REPOSITORY: &str = "https://github.com/gruyere-allocator/gruyere";

/// This part of the test run: every link has a target.
pub fn check_links(root: &Path) -> Result<(), String> {
    let pages = pages(root)?;
    let mut wrong = Vec::new();
    for (path, (_, page)) in &pages {
        for link in page.links.iter().filter(|link| !link.is_outside()) {
            if let Err(reason) = leads_somewhere(root, &pages, path, link) {
                wrong.push(format!("{}: {reason}", path.display()));
            }
        }
    }
    let (_, summary) = pages.get(Path::new(SUMMARY)).ok_or_else(|| format!("no {SUMMARY}"))?;
    let listed: Vec<_> =
        summary.links.iter().map(|link| target(Path::new(SUMMARY), &link.path)).collect();
    for path in pages.keys().filter(|path| path.starts_with(PAGES)) {
        if path != Path::new(SUMMARY) && !listed.contains(path) {
            wrong.push(format!("{} is not in {SUMMARY}", path.display()));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

fn leads_somewhere(
    root: &Path,
    pages: &BTreeMap<PathBuf, (String, Page)>,
    from: &Path,
    link: &links::Link,
) -> Result<(), String> {
    let path = if link.path.is_empty() { from.to_owned() } else { target(from, &link.path) };
    if !root.join(&path).exists() {
        return Err(format!("there is no {}", path.display()));
    }
    let Some(anchor) = &link.anchor else { return Ok(()) };
    match pages.get(&path) {
        Some((_, page)) if page.anchors.contains(anchor) => Ok(()),
        Some(_) => Err(format!("{} has no heading #{anchor}", path.display())),
        // A line in a source file.
        None => Ok(()),
    }
}

/// The file that `link` on the page `from` names, from the root.
fn target(from: &Path, link: &str) -> PathBuf {
    let mut path = from.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

/// The Markdown pages that git tracks or would add, by path from the root.
fn pages(root: &Path) -> Result<BTreeMap<PathBuf, (String, Page)>, String> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"]);
    let listed = output(git.current_dir(root))?;
    let read = |name: &str| {
        let text = fs::read_to_string(root.join(name)).map_err(|e| format!("{name}: {e}"))?;
        let page = links::read(&text);
        Ok((PathBuf::from(name), (text, page)))
    };
    // A deleted page is listed until the commit.
    let there = listed.split('\0').filter(|name| !name.is_empty() && root.join(name).exists());
    there.map(read).collect()
}

/// `cargo xtask site`.
pub fn write(root: &Path) -> Result<(), String> {
    check_links(root)?;
    println!("{}", build(root)?.display());
    Ok(())
}

/// Builds the site; returns its first page.
pub fn build(root: &Path) -> Result<PathBuf, String> {
    let mdbook = tools::find(root, "mdbook")
        .ok_or_else(|| format!("no mdbook: install it with `{}`", tools::COMMAND))?;
    let source = root.join(SOURCE);
    let wrong = |error: std::io::Error| format!("{SOURCE}: {error}");
    if source.exists() {
        fs::remove_dir_all(&source).map_err(wrong)?;
    }
    copy(&root.join(PAGES), &source).map_err(wrong)?;
    for (path, (text, page)) in pages(root)? {
        if let Ok(inside) = path.strip_prefix(PAGES) {
            fs::write(source.join(inside), for_site(root, &path, &text, &page)).map_err(wrong)?;
        }
    }
    succeed(Command::new(&mdbook).args(["build", "--dest-dir"]).arg(root.join(BOOK)).arg(root))?;
    let first = root.join(BOOK).join("index.html");
    if first.exists() { Ok(first) } else { Err(format!("mdBook made no {BOOK}/index.html")) }
}

/// A page whose links to files outside the site lead to the repository.
fn for_site(root: &Path, path: &Path, text: &str, page: &Page) -> String {
    let mut changed = text.to_owned();
    // From the end, so that earlier positions stay valid.
    let mut links: Vec<_> = page.links.iter().collect();
    links.sort_by_key(|link| std::cmp::Reverse(link.at.start));
    for link in links.into_iter().filter(|link| !link.is_outside() && !link.path.is_empty()) {
        let file = target(path, &link.path);
        if file.starts_with(PAGES) && !root.join(&file).is_dir() {
            continue;
        }
        let kind = if root.join(&file).is_dir() { "tree" } else { "blob" };
        let anchor = link.anchor.as_ref().map(|anchor| format!("#{anchor}")).unwrap_or_default();
        let there = format!("{REPOSITORY}/{kind}/main/{}{anchor}", file.display());
        changed.replace_range(link.at.clone(), &there);
    }
    changed
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        assert!(Command::new("git").arg("init").arg("-q").arg(folder.path()).status().is_ok());
        folder
    }

    #[test]
    fn a_link_that_leads_nowhere_and_a_page_that_nobody_finds_are_named() {
        let folder = tree(&[
            ("docs/SUMMARY.md", "[a](a.md)\n"),
            ("docs/a.md", "# One\n\n[up](../code.rs) [b](b.md#two) [gone](gone.md) [here](#one)\n"),
            ("docs/b.md", "# Other\n\n[web](https://example.org/x)\n"),
            ("code.rs", ""),
        ]);
        let wrong = check_links(folder.path()).unwrap_err();
        assert_eq!(
            wrong.lines().collect::<Vec<_>>(),
            [
                "docs/a.md: docs/b.md has no heading #two",
                "docs/a.md: there is no docs/gone.md",
                "docs/b.md is not in docs/SUMMARY.md",
            ]
        );
    }

    #[test]
    fn on_the_site_a_link_out_of_the_pages_leads_to_the_repository() {
        let folder = tree(&[
            ("docs/a.md", "[c](../code.rs#L3) [b](b.md) [s](../src) [x](#x)"),
            ("src/code.rs", ""),
        ]);
        let text = fs::read_to_string(folder.path().join("docs/a.md")).unwrap();
        let page = links::read(&text);
        assert_eq!(
            for_site(folder.path(), Path::new("docs/a.md"), &text, &page),
            format!(
                "[c]({REPOSITORY}/blob/main/code.rs#L3) [b](b.md) \
                 [s]({REPOSITORY}/tree/main/src) [x](#x)"
            )
        );
    }
}
