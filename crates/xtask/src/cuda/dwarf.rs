//! Signatures and layouts from the compiler's debug information (DWARF): a library's actual code,
//! not a table about it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gimli::{
    AttributeValue, DebuggingInformationEntry, DwTag, EndianSlice, RunTimeEndian, UnitOffset,
};
use object::{Object, ObjectSection};

type Slice<'a> = EndianSlice<'a, RunTimeEndian>;
type Entry<'a> = DebuggingInformationEntry<Slice<'a>>;

/// Maximum depth of pointers to pointers: the interface has `void ***` at most.
const DEPTH: u32 = 4;

/// The type of an argument, or of a pointer's target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `void`.
    Nothing,
    /// Unknown or irrelevant: an incomplete structure, a function.
    Unknown,
    /// Integers, booleans and enumerations, with their size in bytes.
    Integer(u64),
    /// Floating point, with its size in bytes.
    Float(u64),
    /// A pointer; `read_only` if it promises only to read.
    Pointer { read_only: bool, to: Box<Type> },
    /// A structure, a union or an array.
    Record(Record),
}

/// A structure, a union or an array, flattened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub name: String,
    /// Bytes.
    pub size: u64,
    pub fields: Vec<Field>,
}

/// A field of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub path: String,
    pub offset: u64,
    pub size: u64,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Integer,
    Float,
    Pointer,
    /// Bytes without a known use: an array of bytes, a union.
    Bytes,
}

/// A function, or (in C) the target of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Enclosing modules, types and functions, joined by `::`.
    pub scope: String,
    pub name: String,
    pub result: Type,
    pub parameters: Vec<Type>,
}

/// Contents of an object.
#[derive(Debug, Default)]
pub struct Model {
    pub functions: Vec<Signature>,
    /// Enumerators with their values. An enumerator with several values has several entries.
    pub enumerators: BTreeSet<(String, i128)>,
}

/// Reads the functions that `wanted` selects by scope and name, and all enumerators with CUDA's
/// names.
pub fn read(file: &Path, wanted: &dyn Fn(&str, &str) -> bool) -> Result<Model, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let data = std::fs::read(file).map_err(|error| failed(&error))?;
    let object = object::File::parse(&*data).map_err(|error| failed(&error))?;
    let endian = if object.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
    let section = |id: gimli::SectionId| -> Result<Slice<'_>, gimli::Error> {
        // Does not read compressed sections: neither rustc nor cc compresses by default.
        let data = object.section_by_name(id.name()).and_then(|section| section.data().ok());
        Ok(EndianSlice::new(data.unwrap_or_default(), endian))
    };
    let dwarf = gimli::Dwarf::load(section).map_err(|error| failed(&error))?;
    let mut model = Model::default();
    let mut units = dwarf.units();
    let mut any = false;
    while let Some(header) = units.next().map_err(|error| failed(&error))? {
        any = true;
        let unit = dwarf.unit(header).map_err(|error| failed(&error))?;
        Unit { dwarf: &dwarf, unit: &unit }
            .collect(wanted, &mut model)
            .map_err(|error| failed(&error))?;
    }
    if any {
        Ok(model)
    } else {
        Err(failed(&"it has no debugging information (built with `debug = 0`, or stripped)"))
    }
}

struct Unit<'u, 'a> {
    dwarf: &'u gimli::Dwarf<Slice<'a>>,
    unit: &'u gimli::Unit<Slice<'a>>,
}

impl<'a> Unit<'_, 'a> {
    fn collect(&self, wanted: &dyn Fn(&str, &str) -> bool, model: &mut Model) -> gimli::Result<()> {
        // Scope and name of each declared function: a separate definition refers to it.
        let mut declared: BTreeMap<usize, (String, String)> = BTreeMap::new();
        let mut definitions = Vec::new();
        let mut scopes: Vec<(isize, String)> = Vec::new();
        let mut entries = self.unit.entries();
        while let Some(entry) = entries.next_dfs()? {
            let depth = entry.depth();
            scopes.retain(|(at, _)| *at < depth);
            let name = self.name(entry)?;
            let scope =
                || scopes.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join("::");
            match entry.tag() {
                gimli::DW_TAG_subprogram => {
                    if let Some(name) = &name {
                        declared.insert(entry.offset().0, (scope(), name.clone()));
                    }
                    if entry.attr_value(gimli::DW_AT_low_pc).is_some() {
                        definitions.push(entry.offset());
                    }
                }
                gimli::DW_TAG_variable => {
                    if let Some(name) = name.as_deref().filter(|name| wanted(&scope(), name))
                        && let Some(of) = self.target(entry)?
                        && let Some((result, parameters)) = self.function_behind(of)?
                    {
                        model.functions.push(Signature {
                            scope: scope(),
                            name: name.to_owned(),
                            result,
                            parameters,
                        });
                    }
                }
                gimli::DW_TAG_enumerator => {
                    if let Some(name) = name.as_deref().filter(|name| is_cudas(name))
                        && let Some(value) = number(entry.attr_value(gimli::DW_AT_const_value))
                    {
                        model.enumerators.insert((name.to_owned(), value));
                    }
                }
                _ => {}
            }
            // The unit itself has the name of its file.
            if let Some(name) = name.filter(|_| depth > 0) {
                scopes.push((depth, name));
            }
        }
        for offset in definitions {
            let entry = self.unit.entry(offset)?;
            let at = match entry.attr_value(gimli::DW_AT_specification) {
                Some(AttributeValue::UnitRef(offset)) => offset,
                _ => offset,
            };
            let Some((scope, name)) =
                declared.get(&at.0).filter(|(scope, name)| wanted(scope, name))
            else {
                continue;
            };
            let result = match self.target(&entry)? {
                Some(of) => self.type_at(of, DEPTH)?,
                // A definition may leave the result to its declaration.
                None => self
                    .target(&self.unit.entry(at)?)?
                    .map_or(Ok(Type::Nothing), |of| self.type_at(of, DEPTH))?,
            };
            let parameters = self.parameters(offset)?;
            model.functions.push(Signature {
                scope: scope.clone(),
                name: name.clone(),
                result,
                parameters,
            });
        }
        Ok(())
    }

    fn name(&self, entry: &Entry<'a>) -> gimli::Result<Option<String>> {
        let Some(value) = entry.attr_value(gimli::DW_AT_name) else { return Ok(None) };
        Ok(Some(self.dwarf.attr_string(self.unit, value)?.to_string_lossy().into_owned()))
    }

    /// The type that an entry refers to.
    fn target(&self, entry: &Entry<'a>) -> gimli::Result<Option<UnitOffset>> {
        Ok(match entry.attr_value(gimli::DW_AT_type) {
            Some(AttributeValue::UnitRef(offset)) => Some(offset),
            Some(AttributeValue::DebugInfoRef(offset)) => offset.to_unit_offset(&self.unit.header),
            _ => None,
        })
    }

    fn size(&self, entry: &Entry<'a>) -> u64 {
        entry.attr_value(gimli::DW_AT_byte_size).and_then(|value| value.udata_value()).unwrap_or(0)
    }

    fn children(&self, offset: UnitOffset) -> gimli::Result<Vec<Entry<'a>>> {
        let mut tree = self.unit.entries_tree(Some(offset))?;
        let mut children = tree.root()?.children();
        let mut all = Vec::new();
        while let Some(child) = children.next()? {
            all.push(child.entry().clone());
        }
        Ok(all)
    }

    fn parameters(&self, of: UnitOffset) -> gimli::Result<Vec<Type>> {
        let mut parameters = Vec::new();
        for child in
            self.children(of)?.iter().filter(|child| child.tag() == gimli::DW_TAG_formal_parameter)
        {
            parameters
                .push(self.target(child)?.map_or(Ok(Type::Unknown), |of| self.type_at(of, DEPTH))?);
        }
        Ok(parameters)
    }

    /// The function that a variable of type `of` points to.
    fn function_behind(&self, of: UnitOffset) -> gimli::Result<Option<(Type, Vec<Type>)>> {
        let pointer = self.unit.entry(of)?;
        let Some(function) =
            self.target(&pointer)?.filter(|_| pointer.tag() == gimli::DW_TAG_pointer_type)
        else {
            return Ok(None);
        };
        let entry = self.unit.entry(function)?;
        if entry.tag() != gimli::DW_TAG_subroutine_type {
            return Ok(None);
        }
        let result =
            self.target(&entry)?.map_or(Ok(Type::Nothing), |of| self.type_at(of, DEPTH))?;
        Ok(Some((result, self.parameters(function)?)))
    }

    fn type_at(&self, offset: UnitOffset, depth: u32) -> gimli::Result<Type> {
        let entry = self.unit.entry(offset)?;
        let size = self.size(&entry);
        Ok(match entry.tag() {
            gimli::DW_TAG_base_type => match entry.attr_value(gimli::DW_AT_encoding) {
                Some(AttributeValue::Encoding(gimli::DW_ATE_float)) => Type::Float(size),
                // Rust's `()`.
                _ if size == 0 => Type::Nothing,
                _ => Type::Integer(size),
            },
            // Rust's `c_void` is an enum without values.
            gimli::DW_TAG_enumeration_type if self.name(&entry)?.as_deref() == Some("c_void") => {
                Type::Nothing
            }
            gimli::DW_TAG_enumeration_type => Type::Integer(size),
            tag if is_alias(tag) => {
                self.target(&entry)?.map_or(Ok(Type::Nothing), |of| self.type_at(of, depth))?
            }
            gimli::DW_TAG_pointer_type => self.pointer(&entry, depth)?,
            gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type | gimli::DW_TAG_array_type => {
                self.record(offset, &entry, depth)?
            }
            _ => Type::Unknown,
        })
    }

    fn pointer(&self, entry: &Entry<'a>, depth: u32) -> gimli::Result<Type> {
        let Some(of) = self.target(entry)? else {
            return Ok(Type::Pointer { read_only: false, to: Box::new(Type::Nothing) });
        };
        let in_c = self.unit.entry(of)?.tag() == gimli::DW_TAG_const_type;
        let in_rust = self.name(entry)?.is_some_and(|name| name.starts_with("*const"));
        let to = if depth == 0 { Type::Unknown } else { self.type_at(of, depth - 1)? };
        Ok(Type::Pointer { read_only: in_c || in_rust, to: Box::new(to) })
    }

    fn record(&self, offset: UnitOffset, entry: &Entry<'a>, depth: u32) -> gimli::Result<Type> {
        if entry.attr_value(gimli::DW_AT_declaration).is_some() {
            return Ok(Type::Unknown);
        }
        // Rust's nullable function pointer.
        if self
            .name(entry)?
            .is_some_and(|name| name.starts_with("Option<") && name.contains("extern \"C\" fn("))
        {
            return Ok(Type::Pointer { read_only: false, to: Box::new(Type::Unknown) });
        }
        let mut fields = Vec::new();
        let size = self.flatten(offset, 0, "", &mut fields)?;
        if size == 0 {
            return Ok(Type::Unknown);
        }
        // A wrapper of a single value is passed as that value.
        let members = self.children(offset)?;
        let members: Vec<_> =
            members.iter().filter(|child| child.tag() == gimli::DW_TAG_member).collect();
        if let [only] = members[..]
            && entry.tag() == gimli::DW_TAG_structure_type
            && let Some(of) = self.target(only)?
        {
            let inner = self.type_at(of, depth)?;
            if inner.size() == Some(size) {
                return Ok(inner);
            }
        }
        Ok(Type::Record(Record {
            name: self.name(entry)?.unwrap_or_else(|| "unnamed".into()),
            size,
            fields,
        }))
    }

    /// Adds the fields of the type at `offset`, which lies `base` bytes into the whole; returns the
    /// type's size.
    fn flatten(
        &self,
        offset: UnitOffset,
        base: u64,
        path: &str,
        fields: &mut Vec<Field>,
    ) -> gimli::Result<u64> {
        let entry = self.unit.entry(offset)?;
        let size = self.size(&entry);
        let mut add =
            |kind, size| fields.push(Field { path: path.to_owned(), offset: base, size, kind });
        match entry.tag() {
            tag if is_alias(tag) => match self.target(&entry)? {
                Some(of) => self.flatten(of, base, path, fields),
                None => Ok(0),
            },
            gimli::DW_TAG_base_type | gimli::DW_TAG_enumeration_type => {
                let float = entry.attr_value(gimli::DW_AT_encoding)
                    == Some(AttributeValue::Encoding(gimli::DW_ATE_float));
                if size > 0 {
                    add(if float { Kind::Float } else { Kind::Integer }, size);
                }
                Ok(size)
            }
            gimli::DW_TAG_pointer_type => {
                let size = size.max(u64::from(self.unit.encoding().address_size));
                add(Kind::Pointer, size);
                Ok(size)
            }
            gimli::DW_TAG_union_type => {
                add(Kind::Bytes, size);
                Ok(size)
            }
            gimli::DW_TAG_array_type => self.flatten_array(offset, &entry, base, path, fields),
            gimli::DW_TAG_structure_type => {
                let children = self.children(offset)?;
                if children.iter().any(|child| child.tag() == gimli::DW_TAG_variant_part) {
                    add(Kind::Bytes, size);
                    return Ok(size);
                }
                for member in children.iter().filter(|child| child.tag() == gimli::DW_TAG_member) {
                    let at = member.attr_value(gimli::DW_AT_data_member_location);
                    let at = at.and_then(|value| value.udata_value()).unwrap_or(0);
                    let name = self.name(member)?.unwrap_or_default();
                    let path = if path.is_empty() { name } else { format!("{path}.{name}") };
                    if let Some(of) = self.target(member)? {
                        self.flatten(of, base + at, &path, fields)?;
                    }
                }
                Ok(size)
            }
            _ => Ok(size),
        }
    }

    fn flatten_array(
        &self,
        offset: UnitOffset,
        entry: &Entry<'a>,
        base: u64,
        path: &str,
        fields: &mut Vec<Field>,
    ) -> gimli::Result<u64> {
        let mut count = 1;
        for range in
            self.children(offset)?.iter().filter(|child| child.tag() == gimli::DW_TAG_subrange_type)
        {
            let of = |name| {
                range.attr_value(name).and_then(|value: AttributeValue<_>| value.udata_value())
            };
            count *= of(gimli::DW_AT_count)
                .or_else(|| Some(of(gimli::DW_AT_upper_bound)? + 1))
                .unwrap_or(0);
        }
        let Some(of) = self.target(entry)? else { return Ok(0) };
        let mut one = Vec::new();
        let size = self.flatten(of, 0, "", &mut one)?;
        if size == 1 {
            fields.push(Field {
                path: path.to_owned(),
                offset: base,
                size: count,
                kind: Kind::Bytes,
            });
            return Ok(count);
        }
        for index in 0..count {
            self.flatten(of, base + index * size, &format!("{path}[{index}]"), fields)?;
        }
        Ok(count * size)
    }
}

impl Type {
    /// Size in bytes of a passable type.
    pub fn size(&self) -> Option<u64> {
        match self {
            Self::Nothing | Self::Unknown => None,
            Self::Integer(size) | Self::Float(size) => Some(*size),
            Self::Pointer { .. } => Some(size_of::<usize>() as u64),
            Self::Record(record) => Some(record.size),
        }
    }
}

fn is_alias(tag: DwTag) -> bool {
    matches!(
        tag,
        gimli::DW_TAG_typedef
            | gimli::DW_TAG_const_type
            | gimli::DW_TAG_volatile_type
            | gimli::DW_TAG_restrict_type
    )
}

/// Whether an enumerator or a constant has a CUDA name.
pub fn is_cudas(name: &str) -> bool {
    let capital = |rest: &str| rest.starts_with(|first: char| first.is_ascii_uppercase());
    name.starts_with("CU_")
        || name.starts_with("CUDA_")
        || name.strip_prefix("cuda").is_some_and(capital)
}

fn number(value: Option<AttributeValue<Slice<'_>>>) -> Option<i128> {
    match value? {
        AttributeValue::Sdata(value) => Some(value.into()),
        AttributeValue::Udata(value) => Some(value.into()),
        AttributeValue::Data1(value) => Some(value.into()),
        AttributeValue::Data2(value) => Some(value.into()),
        AttributeValue::Data4(value) => Some(value.into()),
        AttributeValue::Data8(value) => Some(value.into()),
        _ => None,
    }
}
