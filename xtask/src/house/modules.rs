//! What a file says, as far as the shape of a folder goes: the paths that it names, the types that
//! it defines, its `impl` blocks.

use std::collections::HashSet;

use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemImpl, Type, UseTree, Visibility};

/// A file.
#[derive(Debug)]
pub struct Module {
    /// From the crate on: `heap::streams::naming`.
    pub path: String,
    pub lines: usize,
    /// What it names outside of its tests, from the crate on. `mod x;` and a `use` that is not
    /// private name nothing: the first declares, the second lets others name.
    pub paths: Vec<String>,
    /// Structures, enumerations, unions, aliases and traits.
    pub types: Vec<String>,
    pub impls: Vec<Impl>,
}

/// An `impl` block.
#[derive(Debug)]
pub struct Impl {
    /// The type's last name.
    pub of: String,
    /// The trait's last name.
    pub of_trait: Option<String>,
    pub methods: usize,
}

/// Reads `text`, the file of module `path`.
pub fn parse(path: &str, text: &str) -> syn::Result<Module> {
    let file = syn::parse_file(text)?;
    let mut reader = Reader {
        module: Module {
            path: path.to_owned(),
            lines: text.lines().count(),
            paths: Vec::new(),
            types: Vec::new(),
            impls: Vec::new(),
        },
        inside: path.split("::").map(str::to_owned).collect(),
        children: file
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Mod(item) if item.content.is_none() => Some(item.ident.to_string()),
                _ => None,
            })
            .collect(),
    };
    reader.visit_file(&file);
    Ok(reader.module)
}

struct Reader {
    module: Module,
    /// The module that is being read, inline ones included.
    inside: Vec<String>,
    /// The modules that the file declares.
    children: HashSet<String>,
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl Reader {
    /// Notes what `segments` name, where that can be told from them: from `crate`, `self` or
    /// `super`, or from a module that the file declares.
    fn note(&mut self, segments: &[String]) {
        let mut path = match segments.first().map(String::as_str) {
            Some("crate") => self.inside[..1].to_vec(),
            Some("self" | "super") => self.inside.clone(),
            Some(name) if self.children.contains(name) => self.inside.clone(),
            _ => return,
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => {
                    path.pop();
                }
                name => path.push(name.to_owned()),
            }
        }
        self.module.paths.push(path.join("::"));
    }

    fn note_use(&mut self, tree: &UseTree, begin: &[String]) {
        let joined = |name: String| [begin, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.note_use(&path.tree, &joined(path.ident.to_string())),
            UseTree::Name(name) if name.ident == "self" => self.note(begin),
            UseTree::Name(name) => self.note(&joined(name.ident.to_string())),
            UseTree::Rename(rename) => self.note(&joined(rename.ident.to_string())),
            UseTree::Glob(_) => self.note(begin),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_use(tree, begin)),
        }
    }
}

fn last_name(of: &Type) -> Option<String> {
    match of {
        Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        Type::Reference(reference) => last_name(&reference.elem),
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test(attributes(item)) {
            return;
        }
        match item {
            Item::Struct(item) => self.module.types.push(item.ident.to_string()),
            Item::Enum(item) => self.module.types.push(item.ident.to_string()),
            Item::Union(item) => self.module.types.push(item.ident.to_string()),
            Item::Type(item) => self.module.types.push(item.ident.to_string()),
            Item::Trait(item) => self.module.types.push(item.ident.to_string()),
            Item::Mod(item) if item.content.is_some() => {
                self.inside.push(item.ident.to_string());
                visit::visit_item_mod(self, item);
                self.inside.pop();
                return;
            }
            Item::Use(item) => {
                if matches!(item.vis, Visibility::Inherited) {
                    self.note_use(&item.tree, &[]);
                }
                return;
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if let Some(of) = last_name(&item.self_ty) {
            let name =
                |path: &syn::Path| path.segments.last().map(|segment| segment.ident.to_string());
            let of_trait = item.trait_.as_ref().and_then(|(_, path, _)| name(path));
            let methods = item.items.iter().filter(|item| matches!(item, ImplItem::Fn(_))).count();
            self.module.impls.push(Impl { of, of_trait, methods });
        }
        visit::visit_item_impl(self, item);
    }

    /// `pub(super)` says who may know this file, not whom it knows.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> =
            path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // One name alone is a variable's or a type's.
        if segments.len() > 1 {
            self.note(&segments);
        }
        visit::visit_path(self, path);
    }
}
