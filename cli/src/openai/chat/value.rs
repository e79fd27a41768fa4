//! Values of requests as templates see them: in the order in which they were sent, and with the methods that
//! Python's dictionaries have.

use super::float::{Scientific, float};
use minijinja::{
    Error, State, Value,
    value::{DynObject, Enumerator, Object, ObjectRepr},
};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// The methods of Python's dictionaries.
const OF_DICTIONARIES: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// A dictionary, whose entries keep their order.
///
/// As in Python, `d.items` is the method and `d['items']` the entry of that name, which schemas of tools have.
#[derive(Clone, Debug)]
pub(super) struct Dict {
    entries: DynObject,
    /// Set once a template looks into this dictionary.
    looked_into: Option<Arc<AtomicBool>>,
}

/// A method of a dictionary that a template names and does not call at once.
#[derive(Debug)]
struct Bound {
    dict: Value,
    name: &'static str,
}

/// Any JSON value, as [`Value`].
pub(super) struct Json(pub Value);

impl Dict {
    /// A dictionary of these entries; of two with one name, the later one stays in the earlier one's place.
    pub fn value(entries: Vec<(Value, Value)>) -> Value {
        Self::with(entries, None)
    }

    /// Like [`value`](Self::value); `looked_into` is set once a template reads an entry by its name.
    pub fn watched(entries: Vec<(Value, Value)>, looked_into: Arc<AtomicBool>) -> Value {
        Self::with(entries, Some(looked_into))
    }

    fn with(entries: Vec<(Value, Value)>, looked_into: Option<Arc<AtomicBool>>) -> Value {
        let entries = Value::from_pairs(entries);
        match entries.as_object().cloned() {
            Some(entries) => Value::from_object(Self { entries, looked_into }),
            None => entries,
        }
    }

    fn look(&self) {
        if let Some(seen) = &self.looked_into {
            seen.store(true, Ordering::Relaxed);
        }
    }
}

/// The entries of a dictionary, in their order; none where it is something else.
pub(super) fn entries(value: &Value) -> Vec<(Value, Value)> {
    value.as_object().and_then(DynObject::try_iter_pairs).map(Iterator::collect).unwrap_or_default()
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.look();
        self.entries.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match OF_DICTIONARIES.iter().find(|&&name| name == key) {
            Some(name) => {
                let dict = Value::from_dyn_object(self.clone());
                Some(Value::from_object(Bound { dict, name }))
            }
            None => self.get_value(&Value::from(key)),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match self.entries.try_iter_pairs() {
            Some(pairs) => Enumerator::KeyValueIter(pairs),
            None => Enumerator::Empty,
        }
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.entries.enumerator_len()
    }
}

impl Object for Bound {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        self.dict.call_method(state, self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {} of dict object>", self.name)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(Self)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        let scientific = float(value).contains('e');
        Ok(if scientific { Value::from_object(Scientific(value)) } else { value.into() })
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Json(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some((name, Json(value))) = entries.next_entry::<String, Json>()? {
            list.push((name.into(), value));
        }
        Ok(Dict::value(list))
    }
}
