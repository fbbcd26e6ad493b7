//! The pages with figures: `cargo xtask figures` writes the text between `<!-- figure: NAME -->`
//! and `<!-- . -->`.

use super::{Known, tables, torch};
use crate::parts::text;
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- figure: ";
const NAMED: &str = " -->";
const END: &str = "<!-- . -->";

/// Every documentation page with marks, as it should be.
pub fn fresh(root: &Path, known: &Known) -> Result<Vec<(PathBuf, String)>, String> {
    let mut pages = vec![root.join("README.md")];
    find(&root.join("docs"), &mut pages)?;
    let mut fresh = Vec::new();
    for path in pages {
        let page = text(&path)?;
        let figure = |name: &str| match name.strip_prefix("torch ") {
            Some(what) => torch::figure(what, &known.torch),
            None => tables::figure(name, &known.traces),
        };
        let written = with_figures(&page, figure)
            .map_err(|reason| format!("{}: {reason}", path.display()))?;
        if page.contains(BEGIN) {
            fresh.push((path, written));
        }
    }
    Ok(fresh)
}

fn find(folder: &Path, pages: &mut Vec<PathBuf>) -> Result<(), String> {
    let wrong = |error| format!("{}: {error}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.is_dir() {
            find(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// `page` with the text of `figure` between its marks.
fn with_figures(page: &str, figure: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut written = String::with_capacity(page.len());
    let mut rest = page;
    while let Some((before, marked)) = rest.split_once(BEGIN) {
        let (name, after) =
            marked.split_once(NAMED).ok_or_else(|| format!("a mark {BEGIN:?} has no end"))?;
        let (_, after) =
            after.split_once(END).ok_or_else(|| format!("the figure {name:?} has no {END:?}"))?;
        let value = figure(name).ok_or_else(|| format!("there is no figure {name:?}"))?;
        if !value.contains('\n')
            && (before.is_empty() || before.trim_end_matches(' ').ends_with('\n'))
        {
            return Err(format!(
                "the figure {name:?} begins its line, which makes the line HTML: put a word first"
            ));
        }
        written.extend([before, BEGIN, name, NAMED, &value, END]);
        rest = after;
    }
    Ok(written + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(name: &str) -> Option<String> {
        (name == "excess gruyere").then(|| "0.4% to 3%".to_owned())
    }

    #[test]
    fn what_stands_between_marks_is_replaced() {
        let page = "It holds <!-- figure: excess gruyere -->9%<!-- . --> more, twice <!-- figure: \
                    excess gruyere --><!-- . -->.";
        let fresh = "It holds <!-- figure: excess gruyere -->0.4% to 3%<!-- . --> more, twice \
                     <!-- figure: excess gruyere -->0.4% to 3%<!-- . -->.";
        assert_eq!(with_figures(page, figures).unwrap(), fresh);
        assert_eq!(with_figures(fresh, figures).unwrap(), fresh);
    }

    #[test]
    fn a_mark_without_end_or_figure_is_an_error() {
        let wrong = |page| with_figures(page, figures).unwrap_err();
        assert!(wrong("<!-- figure: excess gruyere -->9%").contains("has no"));
        assert!(wrong("<!-- figure: excess").contains("has no end"));
        assert!(wrong("<!-- figure: weather -->9%<!-- . -->").contains("no figure \"weather\""));
        assert!(
            wrong("a\n <!-- figure: excess gruyere -->9%<!-- . -->").contains("begins its line")
        );
    }
}
