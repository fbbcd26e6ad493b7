//! Links and headings of a Markdown page.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::BTreeMap;
use std::ops::Range;

/// A page's links, and its link targets.
#[derive(Debug, Default)]
pub struct Page {
    /// Anchors of its headings, as GitHub and mdBook name them.
    pub anchors: Vec<String>,
    /// Its links and pictures, in order.
    pub links: Vec<Link>,
}

/// A link or a picture.
#[derive(Debug)]
pub struct Link {
    /// Position of its address in the page.
    pub at: Range<usize>,
    /// The address before `#`; empty: the page itself.
    pub path: String,
    /// What follows `#`.
    pub anchor: Option<String>,
}

impl Link {
    /// Whether it leads to the web.
    pub fn is_outside(&self) -> bool {
        ["http://", "https://", "mailto:"].iter().any(|scheme| self.path.starts_with(scheme))
    }
}

/// Reads a page.
pub fn read(markdown: &str) -> Page {
    let mut page = Page::default();
    let mut heading: Option<String> = None;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for (event, range) in Parser::new_ext(markdown, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let name = anchor(&heading.take().unwrap_or_default());
                let count = seen.entry(name.clone()).or_default();
                page.anchors.push(match count {
                    0 => name,
                    _ => format!("{name}-{count}"),
                });
                *count += 1;
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                page.links.extend(link(markdown, range, &dest_url));
            }
            _ => {}
        }
    }
    page
}

/// The link whose text and address are at `range`.
fn link(markdown: &str, range: Range<usize>, address: &str) -> Option<Link> {
    // In `[![picture](a)](b)`, the outer address is the last.
    let start = range.start + markdown[range].rfind(address)?;
    let (path, anchor) = match address.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor.to_owned())),
        None => (address, None),
    };
    Some(Link { at: start..start + address.len(), path: path.to_owned(), anchor })
}

/// Anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_where_they_stand_and_not_in_code() {
        let text = "See [the map](map.md#zoom) and ![it](a.png), `[no](no.md)`.\n\n```\n[no](no)\n";
        let page = read(text);
        let found: Vec<_> = page.links.iter().map(|link| &text[link.at.clone()]).collect();
        assert_eq!(found, ["map.md#zoom", "a.png"]);
        assert_eq!(page.links[0].path, "map.md");
        assert_eq!(page.links[0].anchor.as_deref(), Some("zoom"));
        let badge = "[![a](https://b.c/d)](#licence)";
        let page = read(badge);
        let found: Vec<_> = page.links.iter().map(|link| &badge[link.at.clone()]).collect();
        assert_eq!(found, ["#licence", "https://b.c/d"]);
        assert!(page.links[1].is_outside() && !page.links[0].is_outside());
    }

    #[test]
    fn headings_are_linked_to_as_github_and_mdbook_name_them() {
        let page = read("# `gruyere doctor --gpu`\n\n## torch's own\n\n## torch's own\n");
        assert_eq!(page.anchors, ["gruyere-doctor---gpu", "torchs-own", "torchs-own-1"]);
    }
}
