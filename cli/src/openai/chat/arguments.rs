//! The arguments of filters and methods, which Python takes by position or by name.

use super::python;
use minijinja::{Error, Value, value::Kwargs};

/// Arguments by position or by name, in the order of `names`.
pub(super) fn arguments<const N: usize>(
    given: &[Value],
    named: &Kwargs,
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    if given.len() > N {
        return Err(python::wrong(format!("only {N} arguments are taken: {}", names.join(", "))));
    }
    let mut all = [const { None }; N];
    for (place, name) in names.into_iter().enumerate() {
        all[place] =
            if named.has(name) { Some(named.get(name)?) } else { given.get(place).cloned() };
    }
    named.assert_all_used()?;
    Ok(all)
}
