"""The functions that finalizers call, and where they would wait, as far as names and annotations show."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from support.repository import ROOT

LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "held"}
REGISTERS = {"finalize": 1, "Finalize": 1, "register": 0, "signal": 1}  # and which argument is called
WAITS = {"acquire", "join", "wait", "wait_for", "get", "result", "select", "poll"}
ARGUMENTS_WITHOUT_TIMEOUT = {"wait_for": 1}


@dataclass
class Class:
    """A class of the package: its methods, its bases, and of which classes its attributes are."""

    methods: dict[str, Function] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)
    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


@dataclass(eq=False)
class Function:
    """A function or method, where it is, and, of a method, its class."""

    place: str
    tree: ast.FunctionDef | ast.Lambda
    owner: str | None


class Code:
    """All classes and functions of some files."""

    def __init__(self, files: Iterable[tuple[str, str]]) -> None:
        self.classes: dict[str, list[Class]] = defaultdict(list)
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.variables: dict[str, set[str]] = defaultdict(set)
        self.trees = [(name, ast.parse(source)) for name, source in files]
        for name, tree in self.trees:
            for node in tree.body:
                self._add(name, node)

    @classmethod
    def of_the_package(cls) -> Code:
        paths = [
            path for layer in ("formats", "loaders", "cli") for path in sorted((ROOT / layer).rglob("*.py"))
        ]
        return cls((str(path.relative_to(ROOT)), path.read_text()) for path in paths)

    def _add(self, file: str, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name].append(Function(f"{file}:{node.name}", node, None))
        elif isinstance(node, ast.ClassDef):
            self._add_class(file, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.variables[name_of(target)] |= called(node.value)

    def _add_class(self, file: str, node: ast.ClassDef) -> None:
        found = Class(bases={name for base in node.bases for name in names(base)})
        self.classes[node.name].append(found)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found.attributes[each.target.id] |= names(each.annotation)
            elif isinstance(each, ast.FunctionDef):
                place = f"{file}:{node.name}.{each.name}"
                found.methods[each.name] = Function(place, each, node.name)
                if each.returns is not None:  # of a property
                    found.attributes[each.name] |= names(each.returns)
                self._add_attributes(found, each)

    def _add_attributes(self, found: Class, method: ast.FunctionDef) -> None:
        given = {arg.arg: names(arg.annotation) for arg in (*method.args.args, *method.args.kwonlyargs)}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                kinds = called(node.value) | names(getattr(node, "annotation", None))
                for name in names(node.value):
                    kinds |= given.get(name, set())
                for target in targets:
                    for part in ast.walk(target):
                        if is_of_self(part):
                            found.attributes[part.attr] |= kinds  # type: ignore[attr-defined]

    def finalizers(self) -> Iterator[Function]:
        """Every ``__del__``, and what is registered with a collector, a fork, an exit or a signal."""
        for each in (each for found in self.classes.values() for each in found):
            yield from (method for name, method in each.methods.items() if name == "__del__")
        for file, tree in self.trees:
            for owner, function, node in calls_of(tree):
                yield from self._registered(file, owner, function, node)

    def _registered(
        self, file: str, owner: str | None, function: ast.FunctionDef | None, node: ast.Call
    ) -> Iterator[Function]:
        name = name_of(node.func)
        given = [keyword.value for keyword in node.keywords if name == "register_at_fork"]
        if name in REGISTERS and len(node.args) > REGISTERS[name]:
            given.append(node.args[REGISTERS[name]])
        for value in given:
            where = f"{file}:{name}"
            if isinstance(value, ast.Lambda):
                yield Function(where, value, owner)
            nested = ast.walk(function) if function else ()
            inner = [n for n in nested if isinstance(n, ast.FunctionDef) and n.name == name_of(value)]
            yield from (Function(f"{file}:{n.name}", n, owner) for n in inner)
            yield from self.resolved(value, owner, function)

    def reached(self, start: Function, callbacks: Mapping[str, Iterable[str]]) -> set[Function]:
        """The function, and all that it calls as far as is known; ``callbacks`` are what it was given."""
        found, left = {start}, [start]
        while left:
            function = left.pop()
            for name in callbacks.get(function.place.rpartition(":")[2], ()):
                kind, _, method = name.rpartition(".")
                new = set(self.methods(kind, method)) - found
                found |= new
                left += new
            for node in ast.walk(function.tree):
                if isinstance(node, ast.Call):
                    tree = function.tree if isinstance(function.tree, ast.FunctionDef) else None
                    new = set(self.resolved(node.func, function.owner, tree)) - found
                    found |= new
                    left += new
        return found

    def resolved(
        self, call: ast.expr, owner: str | None, within: ast.FunctionDef | None
    ) -> Iterator[Function]:
        """What may be called by this expression."""
        if isinstance(call, ast.Name):
            yield from self.functions[call.id]
            yield from self.methods(call.id, "__init__")
        elif isinstance(call, ast.Attribute):
            for kind in self.kinds(call.value, owner, within):
                yield from self.methods(kind, call.attr)

    def kinds(self, value: ast.expr, owner: str | None, within: ast.FunctionDef | None) -> set[str]:
        """Of which classes an expression may be."""
        if isinstance(value, ast.Name) and value.id == "self":
            return {owner} if owner else set()
        if isinstance(value, ast.Name):
            local = self._kinds_of_variable(value.id, owner, within) if within else set()
            return local or self.variables.get(value.id, set())
        if isinstance(value, ast.Attribute):
            found = set()
            for kind in self.kinds(value.value, owner, within):
                for each in self.family(kind):
                    found |= each.attributes.get(value.attr, set())
            return found
        return called(value)

    def _kinds_of_variable(self, name: str, owner: str | None, within: ast.FunctionDef) -> set[str]:
        found = set()
        for arg in (*within.args.args, *within.args.kwonlyargs):
            if arg.arg == name:
                found |= names(arg.annotation)
        for node in ast.walk(within):
            sources = []
            if isinstance(node, ast.Assign) and any(name in names(target) for target in node.targets):
                sources = [node.value]
            elif isinstance(node, ast.For) and name in names(node.target):
                sources = [node.iter]
            for source in sources:
                for part in ast.walk(source):
                    if isinstance(part, ast.Attribute) and is_of_self(part):
                        found |= self.kinds(part, owner, None)
                found |= called(source)
        return found

    def methods(self, kind: str, name: str) -> Iterator[Function]:
        for each in self.family(kind):
            if name in each.methods:
                yield each.methods[name]

    def family(self, kind: str) -> list[Class]:
        """The classes of that name, those they are derived from, and those that are derived from them."""
        names_up, names_down = {kind}, {kind}
        for _ in range(5):
            names_up |= {
                base for name in names_up for each in self.classes.get(name, []) for base in each.bases
            }
            names_down |= {
                name
                for name, found in self.classes.items()
                if any(names_down & each.bases for each in found) and name not in ("Owned", "Protocol", "ABC")
            }
        known = (names_up - {"Owned", "Protocol", "ABC", "AbstractContextManager"}) | names_down
        return [each for name in known for each in self.classes.get(name, [])]

    def waits(self, function: Function) -> Iterator[str]:
        """Where it takes a lock, or waits for something without a limit."""
        for node in ast.walk(function.tree):
            if isinstance(node, ast.With):
                for item in node.items:
                    if self._is_lock(item.context_expr, function):
                        yield f"{function.place} holds {ast.unparse(item.context_expr)}"
            elif isinstance(node, ast.Call) and self._waits_without_limit(node, function):
                yield f"{function.place} calls {ast.unparse(node)}"

    def _is_lock(self, value: ast.expr, function: Function) -> bool:
        tree = function.tree if isinstance(function.tree, ast.FunctionDef) else None
        return bool(LOCKS & self.kinds(value, function.owner, tree))

    def _waits_without_limit(self, node: ast.Call, function: Function) -> bool:
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            return False
        if node.func.attr == "acquire":
            return not node.keywords
        least = ARGUMENTS_WITHOUT_TIMEOUT.get(node.func.attr, 0)
        is_of_a_mapping = node.func.attr == "get" and bool(node.args)
        return len(node.args) + len(node.keywords) <= least and not is_of_a_mapping


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def names(node: ast.AST | None) -> set[str]:
    return {name_of(each) for each in (ast.walk(node) if node else ())} - {""}


def called(node: ast.AST | None) -> set[str]:
    """What an expression calls, the classes whose instances it makes among them."""
    calls = [each.func for each in (ast.walk(node) if node else ()) if isinstance(each, ast.Call)]
    return {name_of(call) for call in calls}


def calls_of(tree: ast.AST) -> Iterator[tuple[str | None, ast.FunctionDef | None, ast.Call]]:
    """All calls, each with the class and the function that it is in."""

    def visit(
        node: ast.AST, owner: str | None, function: ast.FunctionDef | None
    ) -> Iterator[tuple[str | None, ast.FunctionDef | None, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield owner, function, child
            inner_owner = child.name if isinstance(child, ast.ClassDef) else owner
            inner = child if isinstance(child, ast.FunctionDef) else function
            yield from visit(child, inner_owner, inner)

    return visit(tree, None, None)
